"""The protocol by which ranks open a store, are granted its parts, seal and decide.

- `agreement.Agreement` is the face: each method is one exchange of all ranks.
- `opening`, `seal` and `unanimous` are the protocol's programs, written over the `effects` that
  they ask for; `driver` runs a program over a channel, `torch_channel` is torch.distributed's.
- `sights`, `reports` and `peers` are what the ranks exchange.

A model checker runs the same programs over a simulated channel (`tests/ranks_agreement`).
"""
