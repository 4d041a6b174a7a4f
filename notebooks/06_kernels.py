# %% [markdown]
# # Kernels: bytes against bandwidth
#
# Decoding reads far more than it computes: every step reads all keys and values of every request, and uses each of
# them a few times. So a kernel is judged by the bytes it must move over the time it took, against what the card
# moves when it does nothing else. There is no GPU in this notebook: all figures are recorded ones, from
# `docs/measurements`, which says what the fields mean; each file names chip, versions, date and command.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from mtp_jax.bench.tables import table

plt.style.use("style.mplstyle")


def claim(sentence, holds):
    assert holds, sentence
    print("holds:", sentence)


files = {path.name: json.loads(path.read_text()) for path in sorted(Path("../docs/measurements").glob("*.json"))}
of_kernels = {name: file for name, file in files.items() if "kernels_pallas" in file["command"]}
rows = [["file", "chip", "versions", "results"]]
for name, file in of_kernels.items():
    versions = ", ".join(f"{library} {version}" for library, version in file["versions"].items())
    rows.append([name, file["chip"], versions, str(len(file["results"]))])
print(table(rows), end="\n\n")
for name, file in of_kernels.items():
    print(f"{name}\n    {file['command']}")

# %% [markdown]
# ## Paged attention
#
# One call for 64 requests of 4,096 positions, unless the name says otherwise. `W4`: four rows a request, as when
# three drafts are verified. GQA: 32 query heads, 8 key heads, 128 channels. MLA: latent keys of 512 + 64 channels,
# 16 or 128 query heads. Where a case was measured more than once, its newest figure counts.

# %%
newest, ceilings = {}, {}
for file in of_kernels.values():  # in the order of their dates
    for result in file["results"]:
        if result["name"] == "ceilings":
            ceilings.update({key: value for key, value in result.items() if key != "name"})
        elif "us" in result:
            newest[result["name"]] = result
PEERS = (" flashinfer", " cudnn")
ours = {  # a name with a comma is a variant that was tried
    name: result
    for name, result in newest.items()
    if name.startswith(("gqa", "mla")) and not name.endswith((*PEERS, "write")) and "," not in name
}
copy, product = ceilings["copy_TBps"], ceilings["matmul_TFLOPs"]
print(f"the card, measured by itself: copies {copy} TB/s, bf16 products {product} TFLOP/s")

fig, ax = plt.subplots(figsize=(9, 4.4))
us = np.logspace(1.4, 3, 50)
ax.plot(us, us * copy, color="black", linewidth=1, label=f"the card's own copy, {copy} TB/s")
ax.plot(us, us * copy / 2, color="black", linewidth=0.6, linestyle=":", label="half of it")
labelled = {"gqa W1": (8, -4), "gqa W1 batch1 32k": (8, -4), "mla16 W1": (-10, -14), "mla128 W4": (8, -4)}
for marker, color, ending, label in (("o", "C0", "", "this kernel"), ("x", "C1", " flashinfer", "FlashInfer")):
    chosen = {n: newest[n + ending] for n in ours if n + ending in newest and "TBps" in newest[n + ending]}
    chosen = {n: r for n, r in chosen.items() if "chunk" not in n}
    ax.plot(
        [r["us"] for r in chosen.values()],
        [r["us"] * r["TBps"] for r in chosen.values()],
        marker,
        color=color,
        label=label,
    )
    for name in labelled.keys() & chosen.keys() if not ending else ():
        r = chosen[name]
        ax.annotate(name, (r["us"], r["us"] * r["TBps"]), xytext=labelled[name], textcoords="offset points", fontsize=8)
ax.set(xscale="log", yscale="log", xlabel="microseconds a call", ylabel="megabytes of keys and values")
ax.set(title="bytes that must be read, and the time it took: above the line is out of reach")
ax.legend()
plt.show()

# %% [markdown]
# ## Share of the bandwidth
#
# The same as bars, with FlashInfer on the same lengths and page tables beside it. MLA with 128 heads is left out: it
# is bound by products, see below.

# %%
names = [n for n, r in ours.items() if "TBps" in r and not n.startswith("mla128") and "chunk" not in n]
fig, ax = plt.subplots(figsize=(9, 3.8))
x = np.arange(len(names))
ax.bar(x - 0.2, [ours[n]["TBps"] / copy for n in names], 0.4, label="this kernel")
peers = [newest.get(f"{n} flashinfer", {}).get("TBps", np.nan) / copy for n in names]
ax.bar(x + 0.2, peers, 0.4, label="FlashInfer")
ax.axhline(1, color="black", linewidth=1)
ax.set_xticks(x, names, rotation=35, ha="right")
ax.set(ylabel="share of the card's copy", ylim=(0, 1.15))
ax.legend(ncols=2, loc="upper right")
plt.show()

# %% [markdown]
# ## Why verifying is nearly free
#
# Three drafts make four rows a request. The keys and values are read once for all of them: bytes stay, operations
# grow fourfold. As long as a shape is far from the card's rate of products, the step takes hardly longer; that is
# what drafting lives on. MLA with 128 heads is near that rate with one row already.

# %%
rows = [["shape", "one row, us", "four rows, us", "ratio", "TFLOP/s with one row", "of the card's"]]
ratios = {}
for shape in ("gqa", "mla16", "mla128"):
    one, four = ours[f"{shape} W1"], ours[f"{shape} W4"]
    ratios[shape] = four["us"] / one["us"]
    share = one["TFLOPs"] / product
    rows.append(
        [shape, f"{one['us']:.0f}", f"{four['us']:.0f}", f"{ratios[shape]:.2f}", f"{one['TFLOPs']:.0f}", f"{share:.0%}"]
    )
print(table(rows))

fig, ax = plt.subplots(figsize=(8, 4))
intensity = np.logspace(0, 3.4, 100)
ax.plot(
    intensity, np.minimum(intensity * copy, product), color="black", linewidth=1, label="roofline of the measured rates"
)
for index, shape in enumerate(("gqa", "mla16", "mla128")):
    for rows_, marker in (("W1", "o"), ("W4", "s")):
        r = ours[f"{shape} {rows_}"]
        ax.plot(r["TFLOPs"] / r["TBps"], r["TFLOPs"], marker, color=f"C{index}", label=f"{shape} {rows_}")
ax.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
ax.legend(ncols=2)
plt.show()

# %% [markdown]
# ## Experts
#
# The product of few rows with many experts' weights is bound by reading the weights of those experts that have rows.
# XLA has two ways: its ragged product, and every row through every expert.

# %%
ENDINGS = {"mosaic_gpu": "this kernel", "reference": "lax.ragged_dot", "through all": "every row, every expert"}
grouped = [name.removesuffix(", mosaic_gpu") for name in newest if name.endswith(", mosaic_gpu")]
fig, ax = plt.subplots(figsize=(9, 3.2))
for index, (ending, label) in enumerate(ENDINGS.items()):
    times = [newest.get(f"{shape}, {ending}", {}).get("us", np.nan) for shape in grouped]
    ax.barh(np.arange(len(grouped)) + 0.27 * (index - 1), times, 0.25, label=label)
ax.set(yticks=range(len(grouped)), yticklabels=grouped, xlabel="microseconds a call")
ax.invert_yaxis()
ax.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
plt.show()

# %% [markdown]
# ## Products of few rows
#
# A decode step multiplies a handful of rows with all of a model's weights: again bytes, and few operations. The
# streamed products of a decoder of 1.24 billion weights, one by one; small matrices are over before the card's
# memory is busy.

# %%
streamed = {name.removesuffix(" rows"): r for name, r in newest.items() if name.endswith(" rows") and "TBps" in r}
products = list(dict.fromkeys(name.rpartition(", ")[0] for name in streamed))
fig, ax = plt.subplots(figsize=(9, 3.2))
x = np.arange(len(products))
for index, count in enumerate((1, 8, 64)):
    shares = [streamed.get(f"{name}, {count}", {}).get("TBps", np.nan) / copy for name in products]
    ax.bar(x + 0.27 * (index - 1), shares, 0.25, label=f"{count} row{'s' * (count > 1)}")
ax.axhline(1, color="black", linewidth=1)
ax.set_xticks(x, products)
ax.set(ylabel="share of the card's copy", ylim=(0, 1.25))
ax.legend(ncols=3, loc="upper right")
plt.show()

# %% [markdown]
# ## From measurement to measurement
#
# Cases that stand in more than one file, oldest first.

# %%
history = {}
for file in of_kernels.values():
    for result in file["results"]:
        if "us" in result:
            history.setdefault(result["name"], []).append((file["date"], result["us"]))
again = {name: values for name, values in history.items() if len(values) > 1}
rows = [["case", "first", "newest", "ratio"]]
for name, values in again.items():
    (_, first), (_, last) = values[0], values[-1]
    rows.append([name, f"{first:.1f} us", f"{last:.1f} us", f"{last / first:.2f}"])
print(table(rows) if again else "every case was measured once so far")

# %% [markdown]
# ## What holds

# %%
measured = {name: r for name, r in newest.items() if "TBps" in r}
claim("nothing moves more than the card does by itself", all(r["TBps"] <= 1.02 * copy for r in measured.values()))
claim(
    "GQA reads at nine tenths of the copy or near it", min(ours[n]["TBps"] for n in ("gqa W1", "gqa W4")) > 0.85 * copy
)
claim(
    "four rows take little longer than one where products are far from their limit",
    max(ratios["gqa"], ratios["mla16"]) < 1.2,
)
claim("and much longer where they are not", ratios["mla128"] > 2)
claim(
    "ragged contexts: faster than FlashInfer",
    all(ours[n]["us"] < newest[f"{n} flashinfer"]["us"] for n in ("gqa W1 ragged", "mla16 W4 ragged")),
)
claim(
    "each active expert's weights once: faster than both of XLA's ways",
    all(
        newest[f"{s}, mosaic_gpu"]["us"] < min(newest[f"{s}, reference"]["us"], newest[f"{s}, through all"]["us"])
        for s in grouped
    ),
)
