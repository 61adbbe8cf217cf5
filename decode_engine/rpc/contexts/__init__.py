"""Which contexts a call means, and what it changes of one: names, pages, filters, orders, updates"""
