"""Models, contexts and schemas that are made up."""
