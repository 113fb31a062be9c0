"""Changes to a store that a user asks for beside training: pins, and removals."""
