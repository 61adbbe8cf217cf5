"""Many servers as one: a front door that forwards calls by the rule, and Ray, which places, watches and scales them"""
