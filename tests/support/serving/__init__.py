"""What tests of servers need: stores, clients that speak HTTP/2 by themselves, conversations."""
