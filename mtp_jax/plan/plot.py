"""A plan drawn: least time of a step, and most tokens a second, over the batch size. Needs the extra `plot`."""

from pathlib import Path

from mtp_jax.core.errors import ConfigError
from mtp_jax.plan.plan import RATES, Plan, conditional_rates
from mtp_jax.plan.text import tokens_per_s

SUFFIXES = (".png", ".svg")


def check_plot(file: Path) -> None:
    """`ConfigError` for a file that cannot be drawn, before anything is planned."""
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {file} must end in {' or '.join(SUFFIXES)}.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file} is in no folder that exists.")
    try:
        import matplotlib as matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install the extra 'plot', or leave it out.") from error


def draw(plan: Plan, file: Path) -> None:
    """Writes the picture: one line for each draft length, batch sizes from left to right on a log scale."""
    from matplotlib.figure import Figure  # of its own: no window, and no state that others see

    shares = plan.question.accepted_per_pos
    length = plan.question.speculative.num_speculative_tokens
    rates = (RATES[1],) * length if shares is None else conditional_rates(shares)
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    times, speeds = figure.subplots(1, 2)
    sizes = [one.batch for one in plan.batches]
    for k in range(length + 1):
        times.plot(sizes, [one.floors[k].seconds * 1e3 for one in plan.batches], marker="o", label=f"K = {k}")
        speeds.plot(sizes, [tokens_per_s(one.floors[k], rates) for one in plan.batches], marker="o", label=f"K = {k}")
    assumed = f"each draft kept at {RATES[1]:.0%}" if shares is None else "accepted as given"
    titles = ("Least time of a step, ms", f"Most tokens a second, {assumed}")
    for axes, title in zip((times, speeds), titles, strict=True):
        axes.set(title=title, xlabel="requests at once", xscale="log", yscale="log", xticks=sizes)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        for one in plan.batches:
            if one.used_bytes > plan.memory.usable_bytes:
                axes.axvline(one.batch, color="0.6", linestyle=":")
    figure.suptitle(f"{plan.question.family.name} on {plan.question.where.name} (dotted: does not fit)")
    figure.savefig(file)
