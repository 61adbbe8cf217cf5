"""The wire: messages and services that clients and servers share."""
