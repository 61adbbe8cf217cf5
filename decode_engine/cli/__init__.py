"""The command `decode-engine`: one file per subcommand, and what they share."""
