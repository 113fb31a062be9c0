"""A step that runs beside the model: hooks, the order of chunks, and the pass in the background.

This wing may know `engine` and every wing below it. It never imports the optimizer or
`integrations`. Its step strategies, `forward.BesideForward` and `backward.DuringBackward`, are
imported by their users only on demand, since they need torch's compiler, which takes seconds to
import.
"""
