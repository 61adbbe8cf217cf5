"""The gRPC side: messages in, messages out. `transport` aside, no folder below this one knows gRPC."""
