"""What a model would do on accelerators that are not here: memory, exchanges, the least time of a step, drafts."""

from mtp_jax.plan.chips import slice_named as slice_named
from mtp_jax.plan.model import planned_family as planned_family
from mtp_jax.plan.plan import Plan as Plan
from mtp_jax.plan.plan import Question as Question
from mtp_jax.plan.plan import make_plan as make_plan
