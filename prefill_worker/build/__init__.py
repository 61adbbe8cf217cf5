"""From recorded queries, keys and values to stored layers and indexes."""
