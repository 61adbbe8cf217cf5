"""Commands that serve: the gRPC server, the gateway, and the tokens that open both."""
