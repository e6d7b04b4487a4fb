"""The inside of the calls with projections: their weights and checks, and the path of a call."""
