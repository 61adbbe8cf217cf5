"""The commands `contexts` and `operations`: a server's contexts, and those that it makes, over gRPC."""
