"""Two optimizers of one model with ``overlap="backward"``, whose root module is never called."""

import torch

import offload


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 6)
        self.last = torch.nn.Linear(6, 1)

    def loss(self, x):
        return self.last(self.first(x)).square().mean()


def test_the_first_step_of_one_lays_out_while_the_other_is_half_stepped(tmp_path):
    seen = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = Net()
        halves = [net.first.parameters(), net.last.parameters()]
        if ours:
            optimizers = [
                offload.AdamW(
                    half,
                    lr=0.1,
                    directory=tmp_path / f"store{n}",
                    model=net,
                    options=offload.Options(overlap="backward"),
                )
                for n, half in enumerate(halves)
            ]
        else:
            optimizers = [torch.optim.AdamW(half, lr=0.1) for half in halves]
        for _ in range(3):
            net.loss(torch.randn(4, 8)).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
        if ours:
            for optimizer in optimizers:
                optimizer.checkpoint()
                optimizer.close()
    assert all(map(torch.equal, *seen))
