"""How calls reach their handlers and answers their clients: the listener, its bounds, and errors on the wire"""
