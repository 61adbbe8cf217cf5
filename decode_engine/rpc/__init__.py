"""The gRPC side: messages in, messages out. Everything else in decode_engine works without gRPC."""
