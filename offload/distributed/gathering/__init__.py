"""Sending of new values, during a step, to the other ranks that hold a parameter.

- `holder_groups` finds which ranks hold a box, `gather_plan` the order of what is sent, equal on
  all ranks.
- `gather` sends and receives while chunks stream; `live_ranges` are the memory that it reads and
  fills.
- `step_agreement` is the exchange before a step that changes nothing unless all ranks can step.
"""
