"""The reasons of a training plan: each rule of chapters 1, 4, 5, 6 and 12 that applies, with its values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, REPLICA_AXES, STAGE_AXES
from rooftop.core.quantities import counted, format_bytes, format_count
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, count_params, flops_per_token
from rooftop.models.attention import parameters
from rooftop.models.widths import MOST_PADDING
from rooftop.plan.documents import Reason
from rooftop.plan.pricing import scalar
from rooftop.plan.training.memory import host_bytes
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.step import TrainingStep
from rooftop.roofline import rules


def training_reasons(problem: Problem, step: TrainingStep) -> list[Reason]:
    """The rules of chapters 1, 4, 5, 6 and 12 for this job and the chosen strategy."""
    networks = _nodes if problem.slice.chip.switched else _networks
    return [*_memory(problem, step), *networks(problem, step), *_shapes(problem, step)]


def _f_eff(model: ModelConfig) -> float:
    hidden: float = model.d_ff
    if model.moe is not None:
        # Each device's experts see only their share of the tokens, so it is the active columns that compute.
        hidden = model.moe.active * model.moe.d_ff + model.moe.shared_d_ff
    return rules.effective_d_ff(hidden, model.heads, model.kv_heads, model.d_head, model.mlp_matrices)


def _torus_axes(slice_: Slice) -> float:
    """ICI axes in units of whole rings: an open axis has half the bandwidth of a wrapped one."""
    return sum(1.0 if axis.wrapped else 0.5 for axis in slice_.physical_axes if axis.kind == "torus" and axis.size > 1)


def _memory(problem: Problem, step: TrainingStep) -> Iterator[Reason]:
    numerics = problem.numerics
    parameters = count_params(problem.model).total
    per_parameter = numerics.weight_bytes + numerics.optimizer_bytes + numerics.gradient_bytes
    if problem.adapters is not None:
        per_parameter = problem.adapters.state_bytes(problem.model, per_parameter, step.element_bytes) / parameters
    state = parameters * per_parameter
    yield Reason.at_least(
        rule="data parallelism alone",
        source="chapter 5",
        formula="HBM / bytes per parameter >= parameters",
        value=problem.capacity / per_parameter,
        limit=float(parameters),
        text=f"A device holds the state of {format_count(problem.capacity / per_parameter)} parameters at "
        f"{per_parameter:.3g} B each; the model has {format_count(parameters)}"
        + ("." if state <= problem.capacity else ", so its state must be sharded."),
    )
    total = scalar(problem.memory(step).total)
    if problem.roomy_bytes < total <= problem.capacity:
        yield Reason.at_least(
            rule="room for the compiler",
            source="bench/compiler/compile_random.py",
            formula=f"planned bytes <= {1 - problem.program.habits.headroom:.0%} of usable HBM",
            value=problem.roomy_bytes,
            limit=total,
            text=f"The plan takes {total / problem.capacity:.0%} of HBM. So near to its edge XLA recomputes values "
            "that the plan keeps, or runs out of memory.",
        )
    if (hosts := problem.host_capacity) is not None and (taken := scalar(host_bytes(step))):
        yield Reason.at_least(
            rule="memory of the host",
            source="the catalogue",
            formula="offloaded bytes <= memory of a host / its devices",
            value=hosts,
            limit=taken,
            text=f"A device offloads {format_bytes(taken)} of activations; its part of the host's memory is "
            f"{format_bytes(hosts)}.",
        )
    batch = rules.critical_batch(step.rates.flops_per_s[numerics.compute], step.rates.hbm_bytes_per_s)
    local = float(np.ravel(step.tokens)[0])
    moe = problem.model.moe
    if moe is not None:
        # A device reads E / (ways of expert parallelism) experts for the k that each of its tokens uses.
        ways = float(np.ravel(step.expert_ways)[0])
        batch = max(batch, rules.critical_moe_tokens(batch, moe.experts, moe.active) / ways)
    yield Reason.at_least(
        rule="matmuls bound by FLOPs, not HBM",
        source="chapter 1",
        formula="tokens per device >= C / W_hbm" + ("" if moe is None else " x E / (k x expert ways)"),
        value=local,
        limit=batch,
        text=f"A matmul sees {format_count(local)} tokens; {batch:.0f} suffice to cover reading its weights.",
    )


def _networks(problem: Problem, step: TrainingStep) -> Iterator[Reason]:
    chip, model = problem.slice.chip, problem.model
    devices = problem.slice.chips
    per_chip = problem.workload.batch_tokens / devices
    axes = _torus_axes(problem.slice)
    dtype = problem.numerics.matmul
    if axes:
        alpha = rules.network_intensity(chip, dtype)
        f_eff = _f_eff(model)
        # All experts are gathered, and a token uses k of the E.
        parameters = count_params(model)
        sparsity = parameters.total / parameters.active
        fsdp = rules.fsdp_tokens_per_chip(alpha, axes, sparsity=sparsity)
        yield Reason.at_least(
            rule="FSDP alone",
            source="chapter 5",
            formula="B/N >= C / (W_ici axes)" + ("" if model.moe is None else " x parameters / active parameters"),
            value=per_chip,
            limit=fsdp,
            text=f"FSDP alone would need {fsdp:.0f} tokens per chip over {axes:g} ring axes; you have {per_chip:.0f}"
            + (", enough." if per_chip >= fsdp else ", so it would be bound by ICI."),
        )
        tensor = step.strategies.layouts.along(*COLUMN_AXES)[0]
        spans = [step.strategies.layouts.ways(axis).spans for axis in COLUMN_AXES]
        used = sum(float(np.sum(np.where(span.size > 1, span.ports / 2, 0.0))) for span in spans)
        limit = rules.tensor_limit(f_eff, alpha, max(used, 0.5))
        yield Reason.at_least(
            rule="tensor parallelism",
            source="chapter 5",
            formula="Y <= M_Y F_eff / alpha",
            value=limit,
            limit=float(tensor),
            text=f"Tensor parallelism of {tensor} against a limit of {limit:.1f} ways "
            f"(F_eff {f_eff:.0f}, alpha {alpha:.0f}, {max(used, 0.5):g} ring axes).",
        )
        if axes >= 2:
            mixed = {
                over: rules.mixed_tokens_per_chip(alpha, f_eff, axes - 1, 1, overlapped=over, sparsity=sparsity)
                for over in (False, True)
            }
            yield Reason.at_least(
                rule="FSDP and tensor parallelism mixed",
                source="chapter 5",
                formula="B/N >= 4 alpha^2 / (M_X M_Y F_eff); alpha^2 / (M_X M_Y F_eff) if they overlap",
                value=per_chip,
                limit=mixed[False],
                text=f"The best mix needs {mixed[False]:.0f} tokens per chip if the two take turns on the network, "
                f"{mixed[True]:.0f} if they overlap; you have {per_chip:.0f}.",
            )
            best = rules.best_fsdp(problem.workload.batch_tokens, f_eff * sparsity, devices, axes - 1, 1)
            chosen = float(step.strategies.devices(*GATHER_AXES)[0, 0])
            yield Reason.balanced(
                rule="fewest bytes moved",
                source="chapter 5",
                formula="X = sqrt(B M_X N / (F_eff M_Y))",
                value=chosen,
                limit=best,
                text=f"On paper {best:.0f} ways of FSDP move the fewest bytes; "
                f"{'the search chose' if problem.axes is None else 'the mesh has'} {chosen:.0f}.",
            )
    copies, within = step.strategies.devices(*REPLICA_AXES), step.strategies.within_slice(*REPLICA_AXES)
    if np.any(within < copies) and problem.slice.num_slices > 1:
        need = rules.dcn_tokens_per_slice(chip.flops_per_s[dtype], chip.dcn_bytes_per_s)
        own = problem.workload.batch_tokens / problem.slice.num_slices
        yield Reason.at_least(
            rule="data parallelism over DCN",
            source="chapter 5",
            formula="B per slice >= C / W_dcn",
            value=own,
            limit=need,
            text=f"Each slice has {format_count(own)} tokens a step; gradients over DCN need {format_count(need)}.",
        )


def _nodes(problem: Problem, step: TrainingStep) -> Iterator[Reason]:
    """The rules of the GPU chapter."""
    chip, model = problem.slice.chip, problem.model
    gpus, nodes = problem.slice.shape
    if problem.slice.chips == 1:
        return
    flops = chip.flops_per_s[problem.numerics.matmul]
    rates = flops, chip.ici_bytes_per_s, chip.dcn_bytes_per_s, gpus
    tensor, experts, stages = (
        round(float(step.strategies.devices(*axes)[0, 0])) for axes in (COLUMN_AXES, EXPERT_AXES, STAGE_AXES)
    )
    parameters, own = count_params(model), problem.workload.batch_tokens / problem.slice.chips
    need = rules.fsdp_tokens_per_gpu(
        *rates, nodes, model_ways=tensor * experts * stages, sparsity=parameters.total / parameters.active
    )
    if tensor * experts * stages < problem.slice.chips:
        ways = f" within {tensor * experts * stages} ways of other axes" if tensor * experts * stages > 1 else ""
        yield Reason.at_least(
            rule="FSDP and data parallelism",
            source="chapter 12",
            formula="B/N >= C max over levels of (X-1)/X / W" + ("" if model.moe is None else " x parameters / active"),
            value=own,
            limit=need,
            text=f"FSDP or data parallelism{ways} needs {need:.0f} tokens per GPU; you have {own:.0f}"
            + (", enough." if own >= need else ", so it is bound by NVLink or the network."),
        )
    f_eff = _f_eff(model)
    limit = rules.tensor_limit_on_gpus(f_eff, *rates)
    yield Reason.at_least(
        rule="tensor parallelism",
        source="chapter 12",
        formula="Y <= 1 + F_eff W / C in a node, n + F_eff W_node / C beyond",
        value=limit,
        limit=float(tensor),
        text=f"Tensor parallelism of {tensor} against a limit of {limit:.1f} ways "
        f"(F_eff {f_eff:.0f}, nodes of {gpus}).",
    )
    if model.moe is not None and experts > 1:
        columns = rules.expert_d_ff(*rates, expert_ways=experts, active=model.moe.active)
        # The rule's two matrices of an expert, of which models have three.
        hidden = model.moe.d_ff * model.mlp_matrices / 2
        yield Reason.at_least(
            rule="expert parallelism",
            source="chapter 12",
            formula="F >= C/W min(k, M)/k (M-1)/M, M the GPUs of a node or the nodes",
            value=hidden,
            limit=columns,
            text=f"AllToAlls over {experts} GPUs need experts of {columns:.0f} columns to hide; these count as "
            f"{hidden:.0f}.",
        )
    if nodes > 1:
        inside, outside = (gpus * rate for rate in (chip.ici_bytes_per_s, chip.dcn_bytes_per_s))
        slower = "NVLink" if outside >= chip.ici_bytes_per_s else "the network"
        across = rules.bisection_bytes_per_s(problem.slice.chips, chip.dcn_bytes_per_s)
        yield Reason.at_least(
            rule="egress of a node",
            source="chapter 12",
            formula="n W_network >= W_GPU",
            value=outside,
            limit=chip.ici_bytes_per_s,
            text=f"A node sends {format_bytes(outside)}/s to others, a GPU {format_bytes(chip.ici_bytes_per_s)}/s "
            f"within it: gathers over nodes are bound by {slower}. "
            f"Bisection: {format_bytes(inside)}/s in a node, {format_bytes(across)}/s over all, AllToAlls "
            f"{chip.ici_bytes_per_s / chip.dcn_bytes_per_s:.0f} times slower.",
        )


def _shapes(problem: Problem, step: TrainingStep) -> Iterator[Reason]:
    model, workload = problem.model, problem.workload
    devices = problem.slice.devices
    yield Reason.at_least(
        rule="a sequence for every device",
        source="chapter 6",
        formula="sequences >= devices / (tensor x stage)",
        value=float(workload.batch_seqs),
        limit=float(devices / float((step.strategies.devices(*COLUMN_AXES, *STAGE_AXES))[0, 0])),
        text=f"{counted(workload.batch_seqs, 'sequence')} for {counted(devices, 'device')}: without tensor, context or "
        f"stage axes at most {counted(workload.batch_seqs, 'device')} could each take a whole one.",
    )
    long = 8 * model.d_model
    yield Reason.at_least(
        rule="attention against matmuls",
        source="chapter 4",
        formula="T < 8 D",
        value=float(long),
        limit=float(workload.seq_len),
        text=f"Attention FLOPs exceed those of the matmuls above {format_count(long)} tokens of context; "
        f"yours is {workload.seq_len}.",
    )
    yield Reason.at_least(
        rule="sequences no longer than the model's",
        source="the model's config",
        formula="T <= longest sequence",
        value=float(model.max_seq_len),
        limit=float(workload.seq_len),
        text=f"Sequences have {workload.seq_len:,} tokens; the model was made for {model.max_seq_len:,}.",
    )
    stages = float(step.strategies.devices(*STAGE_AXES)[0, 0])
    if stages > 1:
        counts = float(step.strategies.microbatches[0, 0])
        yield Reason.at_least(
            rule="pipeline bubble",
            source="chapter 5",
            formula="microbatches >= 4 (stages - 1)",
            value=counts,
            limit=4 * (stages - 1),
            text=f"{stages:.0f} stages and {counts:.0f} microbatches: idle {(stages - 1) / counts:.1%} of busy time.",
        )
    padded = {name: (size, float(np.ravel(stored)[0])) for name, (size, stored) in step.widths.padded.items()}
    if wide := [f"{name} {size} as {stored:.0f}" for name, (size, stored) in padded.items() if stored > size]:
        flops = _padded_flops(step)
        yield Reason.at_least(
            rule="padded widths",
            source="even sharding",
            formula="FLOPs of the widths / FLOPs of padded ones >= 1 / 1.2",
            value=1 / (1 + flops),
            limit=1 / (1 + MOST_PADDING),
            text=f"The mesh does not divide all widths, which are padded ({', '.join(wide)}): {flops:.1%} more FLOPs "
            "with the weights of layers.",
        )
    if model.moe is not None:
        batch = rules.critical_batch(step.rates.flops_per_s[problem.numerics.compute], step.rates.hbm_bytes_per_s)
        need = rules.critical_moe_tokens(batch, model.moe.experts, model.moe.active)
        group = float(np.ravel(step.tokens * step.strategies.devices(*EXPERT_AXES))[0])
        yield Reason.at_least(
            rule="experts bound by FLOPs, not HBM",
            source="chapter 4",
            formula="tokens per expert group >= C / W_hbm x E / k",
            value=group,
            limit=need,
            text=f"The experts of a group see {format_count(group)} tokens; {format_count(need)} keep them busy.",
        )


def _padded_flops(step: TrainingStep) -> float:
    """FLOPs with the layers' weights that are padding or copies of heads, relative to those of the true widths."""
    model, moe, tensor = step.model, step.model.moe, step.tensor
    attention = parameters(step.attention.latent) + tensor * parameters(step.attention.into + step.attention.out)
    columns = model.dense_layers * step.columns(model.d_ff) * tensor
    routers = 0
    if moe is not None:
        experts = step.widths.experts * step.expert_ways / moe.experts
        active = moe.active * experts * step.columns_of_expert * step.widths.expert_split
        columns = columns + model.moe_layers * (active + step.columns(moe.shared_d_ff) * tensor)
        routers = model.moe_layers * moe.experts
    used = model.layers * attention + model.d_model * (model.mlp_matrices * columns + routers)
    true = flops_per_token(model, step.workload.seq_len, attention="none", embeddings=False).matmul / 2
    return float(np.ravel(used)[0]) / float(true) - 1


def shortfall(problem: Problem, classes: dict[str, float]) -> str:
    """A sentence on the bytes that are missing, and the class that takes the most."""
    total = sum(classes.values())
    largest = max(classes, key=lambda name: classes[name])
    return (
        f"{format_bytes(total - problem.capacity)} over the {format_bytes(problem.capacity)} of a "
        f"{problem.slice.chip.name} device; of {format_bytes(total)}, {format_bytes(classes[largest])} are {largest}"
    )
