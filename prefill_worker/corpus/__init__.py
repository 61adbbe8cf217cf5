"""Many documents, made contexts of by workers on Ray"""
