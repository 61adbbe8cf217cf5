"""A worker on a queue: takes one job after another, tells how far it is, and obeys cancellation."""
