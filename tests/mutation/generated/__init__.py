"""Mutants of every statement of sealing, opening, restoring, recycling and parts, made by rule.

python -m tests.mutation --generated      # see `tests.mutation.generated.full`
"""
