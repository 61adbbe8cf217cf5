"""The gRPC side: messages in, messages out. No folder below this one knows gRPC."""
