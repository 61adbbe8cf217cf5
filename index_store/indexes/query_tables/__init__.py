"""Query tables (CSAttention): scores of all keys for centroids of the context's own queries."""
