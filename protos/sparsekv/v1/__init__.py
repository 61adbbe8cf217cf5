"""Version 1 of the API: protocol definitions, and the stubs that `ops/protos` makes from them."""
