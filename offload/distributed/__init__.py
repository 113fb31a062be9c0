"""Many ranks that train into one store: what they see, what they write into, what is a checkpoint.

An optimizer begins with `launch.join_ranks`, and its engine is given a `rank_group.RankGroup`. This
wing may know ``torch.distributed`` and the wings below `engine`. It never imports the engine,
nor a wing above it.
"""

from offload.distributed.agreement.agreement import Agreement, Granted
from offload.distributed.agreement.channel import Channel, ChannelLostError
from offload.distributed.agreement.grant import Offer
from offload.distributed.agreement.opening import Plan
from offload.distributed.agreement.reports import Report
from offload.distributed.agreement.sights import Sight
from offload.distributed.agreement.torch_channel import TorchChannel

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
