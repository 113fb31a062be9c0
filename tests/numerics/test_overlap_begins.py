"""With ``overlap="forward"``: a step that has returned before its thread has begun."""

import time

import pytest
import torch

import offload
from offload.overlap.background_pass import RunningPass


def trained(optimizer, model, num_steps):
    """Yield after each step, when nobody has called the model since."""
    for n in range(num_steps):
        torch.manual_seed(n)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        yield


READERS = {
    "data": lambda model: model[0].weight.data.clone(),
    "arithmetic": lambda model: model[0].weight * 1,
    "numpy": lambda model: torch.from_numpy(model[0].weight.detach().numpy().copy()),
    "functional": lambda model: torch.nn.functional.linear(torch.ones(2, 8), model[0].weight),
    "state dict": lambda model: model.state_dict()["0.weight"].clone(),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_waits_for_a_step_whose_thread_has_not_begun_yet(reader, tmp_path, monkeypatch):
    run = RunningPass._run
    delayed = []

    def late(self):
        delayed.append(self.begun)
        time.sleep(0.05)  # as on a machine whose processors are all busy
        run(self)

    monkeypatch.setattr(RunningPass, "_run", late)
    seen = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 1))
        if ours:
            options = offload.Options(overlap="forward")
            optimizer = offload.AdamW(
                model.parameters(), lr=0.1, directory=tmp_path / "run", model=model, options=options
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps = trained(optimizer, model, 4)
        values = []
        for _ in steps:
            values.append(READERS[reader](model).detach().clone())
            if not ours:
                optimizer.zero_grad()
        seen.append(values)
        if ours:
            optimizer.checkpoint()
            optimizer.close()
    assert len(delayed) == 4
    for plain, streamed in zip(*seen, strict=True):
        assert torch.equal(plain, streamed)
