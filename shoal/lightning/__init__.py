"""Lightning under a shoal plan: `Trainer(strategy=ShoalStrategy("plan.toml"), ...)`; docs/lightning.md."""

from shoal.lightning.strategy import ShoalStrategy

__all__ = ["ShoalStrategy"]
