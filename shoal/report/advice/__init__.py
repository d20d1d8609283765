"""What to change next, and what that is predicted to bring: one file a bottleneck, each a few lines of arithmetic.

1. `evidence` takes from a run's summary what a steady step was made of.
2. Each bottleneck's file looks whether the step suffers from it, and says what a plan with another setting would take.
3. What is predicted to bring less than 5% is not said; the rest is, the best first.

Every prediction changes one thing, and leaves all other parts of the step as they were measured.
"""

from shoal.report.advice.advice import Advice
from shoal.report.advice.advise import advise, advise_on, failed_advisers
from shoal.report.advice.follow import flags_of, follow

__all__ = ["Advice", "advise", "advise_on", "failed_advisers", "flags_of", "follow"]
