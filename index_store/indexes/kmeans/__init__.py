"""k-means on the host by faiss, on a device by kernels."""
