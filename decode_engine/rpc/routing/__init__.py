"""Which replica serves a request: one rule, for front doors and for clients that know several addresses"""
