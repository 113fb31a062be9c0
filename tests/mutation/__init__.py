"""Steps of the protocol taken out in turn, a campaign: `python -m tests.mutation --help`."""
