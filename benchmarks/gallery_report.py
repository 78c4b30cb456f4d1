"""What the gallery found, as a table, as sentences and as a picture."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (after the choice of a backend that needs no display)

import machine  # noqa: E402
from gallery_claims import FAR, INITIALISATIONS  # noqa: E402
from gallery_variants import GROUPS, STARTS  # noqa: E402

WIDTH, DPI = 11.0, 100  # inches
SMOOTH = 8  # steps of the curves' running mean


def ratio(run: dict[str, Any], observation: int) -> float:
    """The gradient norm at the first sublayer's input over that at the last one's."""
    norms = run["gradient_norms"][observation]
    return norms[0] / norms[-1] if norms[-1] else math.nan


def number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else str(value)


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as aligned text, by group."""
    head = ("variant", "tokens/s", "train loss", "val loss", "early rises",
            "gradient first/last: start", "end", "outliers", "not finite")  # fmt: skip
    lines = []
    for group, title in GROUPS.items():
        members = [run for run in runs if group in run["groups"]]
        if not members:
            continue
        rows = [head]
        for run in members:
            outliers = sum(map(len, run["outliers"].values()))
            rows.append(
                (
                    run["name"].removeprefix("hard: "),
                    number(run["tokens_per_second"], ".0f"),
                    number(run["train_loss"], ".3f"),
                    number(run["val_loss"], ".3f"),
                    number(run["early_rises"], ".2f"),
                    number(ratio(run, 0), ".2g"),
                    number(ratio(run, -1), ".2g"),
                    str(outliers) if run["norms_watched"] else "-",
                    str(int(run["nonfinite"])),
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines += ["", title[0].upper() + title[1:]]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines[1:])


def deep_gradients(found: list[dict[str, Any]]) -> list[str]:
    depth = len(found[0]["gradient_norms"])
    lines = [
        f"gradients of {depth} layers before training, at the last layer's input and at the first's;",
        f"factor per layer from {FAR} layers before the output on (R2: how well one factor fits):",
    ]
    for entry in found:
        norms, factor = entry["gradient_norms"], entry["factor_per_layer"]
        line = f"  {entry['initialisation'] + ' init:':22} {entry['stack']:15}"
        line += f"{norms[-1]:8.2g} -> {norms[0]:8.2g}"
        lines.append(line + ("" if factor is None else f"  {factor:.3f} a layer ({entry['r_squared']:.3f})"))
    return lines


def padding(found: list[dict[str, Any]]) -> list[str]:
    lines = ["padded text of variable length, loss in training and in validation:"]
    for entry in found:
        lines.append(
            f"  {entry['norm']:29} train {entry['train_loss']:.3f}, val {entry['val_loss']:.3f} "
            f"({entry['gap']:+.1%}); val in training mode {entry['val_loss_in_training_mode']:.3f}"
        )
    return lines


def summary(results: dict[str, Any]) -> str:
    """Table, claims and the machine, as text."""
    claims, settings = results["claims"], results["settings"]
    lines = [table(results["runs"]), ""]
    lines.append(
        "early rises: the sum of all increases of the loss in the first quarter of the steps\n"
        "gradient first/last: its norm at the first sublayer's input over that at the last one's\n"
        "outliers: dimensions of the norms' inputs that vary 10 times as much as the median, or a tenth"
    )
    lines += ["", *deep_gradients(claims["deep_gradients"]), "", *padding(claims["padding"])]
    if claims["batch_of_one"] is not None:
        lines.append(f"  BatchNorm on a batch of one in training mode: {claims['batch_of_one']}")
    if results["missing"]:
        lines += ["", "left out, missing in this fusednorm: " + "; ".join(results["missing"])]
    sizes = f"{settings['steps']} steps of {settings['batch']} x {settings['context']}"
    lines += ["", f"{settings['layers']} layers of {settings['width']}, fp32, {sizes}, one seed"]
    lines.append(f"{machine.sentence(results['machine'])}, {results['machine']['threads']} threads")
    return "\n".join(lines)


def smooth(losses: list[float]) -> list[float]:
    """A running mean over the last SMOOTH steps."""
    windows = [losses[max(i - SMOOTH + 1, 0) : i + 1] for i in range(len(losses))]
    return [sum(window) / len(window) for window in windows]


def color(i: int) -> Any:
    return plt.get_cmap("tab20")(2 * i % 20 + i // 10 % 2)  # the strong colours first


def draw_losses(axis: Any, members: list[dict[str, Any]], raw: bool) -> None:
    for i, run in enumerate(members):
        losses = run["losses"] if raw else smooth(run["losses"])
        label = f"{run['name'].removeprefix('hard: ')}: {number(run['val_loss'], '.3f')}"
        axis.plot(losses, color=color(i), linewidth=1.3, label=label)
    axis.set(
        xlabel="step", ylabel="training loss, nats per character" + ("" if raw else f" (mean of {SMOOTH})")
    )
    axis.legend(title="and validation loss", fontsize=8)


def draw_gradients(axis: Any, members: list[dict[str, Any]]) -> None:
    """In the colours of the losses above."""
    for i, run in enumerate(members):
        for norms, style in (run["gradient_norms"][0], "--"), (run["gradient_norms"][-1], "-"):
            axis.plot(norms, style, color=color(i), linewidth=1.3)
    axis.set(xlabel="sublayer, from the input to the output", ylabel="norm of the loss's gradient there")
    axis.set_yscale("log")


def draw_stacks(axis: Any, found: list[dict[str, Any]]) -> None:
    for i, entry in enumerate(found):
        style = "-" if entry["initialisation"] == INITIALISATIONS[0] else "--"
        label = entry["stack"] if style == "-" else None
        axis.plot(entry["gradient_norms"], style, color=color(i % (len(found) // 2)), label=label)
    axis.set(xlabel="layer, from the input to the output", ylabel="norm of the gradient there")
    axis.set_yscale("log")
    axis.legend(title=f"solid: {INITIALISATIONS[0]}, dashed: {INITIALISATIONS[1]} init", fontsize=8)


def save(figure: Any, results: dict[str, Any], title: str, file: Path) -> None:
    """1,100 pixels wide, with what was trained and where in its title."""
    about, settings = results["machine"], results["settings"]
    figure.suptitle(
        f"{title}\nA character GPT of {settings['layers']} layers of {settings['width']}, "
        f"{settings['steps']} steps on the same batches; {about['cpu']}, torch {about['torch']}",
        fontsize=11,
    )
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


def plot(results: dict[str, Any], folder: Path) -> list[str]:
    """A picture for each group of variants, losses beside gradients; one of deep stacks. Their names."""
    finite = [loss for run in results["runs"] for loss in run["losses"] if math.isfinite(loss)]
    first = max(run["losses"][0] for run in results["runs"])
    files = []
    for group, title in GROUPS.items():
        members = [run for run in results["runs"] if group in run["groups"]]
        if not members:
            continue
        figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 5.5), layout="constrained")
        draw_losses(axes[0], members, raw=group == STARTS)
        axes[0].set_title("Training loss")
        axes[0].set_ylim(0.95 * min(finite), 1.25 * first)  # a run that blows up would flatten the others
        draw_gradients(axes[1], members)
        axes[1].set_title("Gradient by depth\ndashed: before training, solid: at the end")
        for axis in axes:
            axis.grid(alpha=0.3)
        files.append(f"gallery_{group.replace(' ', '_')}.png")
        save(figure, results, title[0].upper() + title[1:], folder / files[-1])
    figure, axis = plt.subplots(figsize=(WIDTH, 5.5), layout="constrained")
    draw_stacks(axis, results["claims"]["deep_gradients"])
    axis.grid(alpha=0.3)
    files.append("gallery_stacks.png")
    title = "Gradient by depth: stacks of feed-forward layers F, before training"
    save(figure, results, title, folder / files[-1])
    return files
