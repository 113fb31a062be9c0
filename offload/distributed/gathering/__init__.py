"""Sending of new values, during a step, to the other ranks that hold a parameter.

- `holder_groups` connects the ranks that hold a box, `gather_plan` has the order of what is sent,
  equal on all ranks, and `gather` sends and receives while chunks stream.
- `step_agreement` is the exchange before a step that changes nothing unless all ranks can step.
"""
