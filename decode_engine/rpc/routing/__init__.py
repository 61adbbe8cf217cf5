"""Which replica serves a request: one rule"""
