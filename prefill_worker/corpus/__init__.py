"""Many documents: found in folders and object stores, and made contexts of by workers on Ray."""
