"""Many ranks that train into one store: what they see, what they write into, what is a checkpoint.

An optimizer begins with `launch.join_ranks`, and its engine is given a `rank_group.RankGroup`. This
wing may know ``torch.distributed`` and the wings below `engine`. It never imports the engine,
nor a wing above it.
"""

from offload.distributed.agreement import Agreement, Granted
from offload.distributed.channel import Channel, ChannelLostError
from offload.distributed.grant import Offer
from offload.distributed.opening import Plan
from offload.distributed.reports import Report
from offload.distributed.sights import Sight
from offload.distributed.torch_channel import TorchChannel

__all__ = [
    "Agreement",
    "Channel",
    "ChannelLostError",
    "Granted",
    "Offer",
    "Plan",
    "Report",
    "Sight",
    "TorchChannel",
]
