"""The rows of family.py's table: every norm, placement and aid of the package, and the tests of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of the table: what there is, what makes it, and the tests of each column.

    ``file::name[word]`` are the tests ``test_name`` of test_file.py, in any room of
    tests/, that have the word in their id, between dashes; ``*`` in the name stands
    for anything. None: there is nothing to be tested.
    """

    name: str
    made_by: str
    values: str
    backward: str | None
    compiled: str | None
    cuda: str


ROWS = (
    Row("LayerNorm", "LayerNorm, layer_norm",
        "values::forward_and_backward[layer_norm] values::wide_rows[layer_norm] values::large_offset",
        "values::forward_and_backward[layer_norm] operators::gradcheck[layer_norm]",
        "operators::opcheck[layer_norm] operators::compile*[layer_norm] operators::export[layer_norm]",
        "simt::forward[layer_norm] simt::backward[layer_norm] values::forward_and_backward[layer_norm]"),
    Row("LayerNorm, annotated form", "LayerNorm(eps_outside, unbiased)",
        "values::annotated_*", "values::annotated_* operators::gradcheck[eps_outside]",
        "operators::opcheck[eps_outside]", "simt::options[layer_norm] values::annotated_*"),
    Row("RMSNorm", "RMSNorm, rms_norm",
        "values::forward_and_backward[rms_norm] values::wide_rows[rms_norm] values::eps_none*",
        "values::forward_and_backward[rms_norm] operators::gradcheck[rms_norm]",
        "operators::opcheck[rms_norm] operators::compile*[rms_norm] operators::export[rms_norm]",
        "simt::forward[rms_norm] simt::backward[rms_norm] values::forward_and_backward[rms_norm]"),
    Row("RMSNorm, casting modes", "RMSNorm(casting_mode)",
        "values::llama_casting_mode values::casting_modes_*", "values::llama_casting_mode",
        "operators::export[rms_norm]", "simt::llama_casting_mode values::llama_casting_mode"),
    Row("weight offset", "weight_offset of both",
        "values::weight_offset", "values::weight_offset operators::gradcheck[weight_offset]",
        "operators::opcheck[weight_offset]", "simt::options values::weight_offset"),
    Row("ScaleNorm", "ScaleNorm, scale_norm",
        "scale_norm::*", "scale_norm::*grad*", "scale_norm::*compile*", "scale_norm::*"),
    Row("GroupNorm", "GroupNorm, group_norm",
        "group_norm::*", "group_norm::*grad*", "group_norm::*compile*", "group_norm::*"),
    Row("InstanceNorm", "InstanceNorm, instance_norm",
        "instance_norm::*", "instance_norm::*grad*", "instance_norm::*compile*", "instance_norm::*"),
    Row("per-head (QK) norm", "HeadNorm; both norms, on strided rows",
        "head_norm::values_and_grads head_norm::*copies_nothing guarantees::strides",
        "head_norm::*grad* guarantees::strides", "head_norm::*compile*",
        "head_norm::values_and_grads guarantees::strides simt::strides"),
    *(Row(title, f'Residual(placement="{placement}"), ResidualStack',
          f"placement::formula[{placement}] placement::stack_gives*[{placement}]{more}",
          f"placement::formula[{placement}] placement::stack_gives*[{placement}]",
          f"placement::compiled[{placement}]", f"placement::formula[{placement}]")
      for title, placement, more in (
          ("Post-Norm", "post", ""), ("Pre-Norm", "pre", ""), ("Sandwich", "sandwich", ""),
          ("DeepNorm", "deep", " deepnorm::*"))),
    Row("fused residual op", "AddLayerNorm, AddRMSNorm, add_*",
        "add_norm::every_pair_of_dtypes add_norm::sizes_* add_norm::llama_* add_operators::in_place*",
        "add_norm::every_pair_of_dtypes add_norm::sizes_* add_operators::gradcheck",
        "add_operators::opcheck* add_operators::compile* add_operators::in_place_compiles",
        "add_norm::every_pair_of_dtypes add_norm::sizes_* add_norm::llama_*"),
    Row("BatchNorm", "BatchNorm",
        "column_norms::values column_norms::large_mean column_norms::as_torchs column_norms::two_processes*",
        "column_norms::values column_norms::gradients_*", "column_norms::compile", "column_norms::values"),
    Row("PowerNorm", "PowerNorm",
        "power_norm::steps power_norm::group_scaling power_norm::padding_*",
        "power_norm::steps power_norm::several_forwards_* power_norm::recomputation*",
        "power_norm::compile", "power_norm::steps power_norm::group_scaling"),
    Row("AdaptiveNorm", "AdaptiveNorm",
        "adaptive_norm::adaptive_formula adaptive_norm::adaptive_ends_*", "adaptive_norm::adaptive_gradients",
        "adaptive_norm::adaptive_schedule_*", "adaptive_norm::adaptive_formula"),
    Row("norm warm-up", "NormWarmup",
        "warmup::lambda* warmup::eps", "warmup::lambda warmup::compiled_backward", "warmup::compiled*",
        "warmup::lambda warmup::eps"),
    Row("initialisation", "init_gain", "modules::initial_gain*", None, None, "modules::initial_gain*"),
    Row("input scale", "input_scale",
        "modules::input_scale_is_an_eps modules::input_scale_against_float64",
        "modules::input_scale_against_float64", "modules::input_scale_compiles",
        "modules::input_scale_against_float64"),
    Row("monitor", "NormMonitor",
        "monitor::statistics_* monitor::several_* monitor::outlier*",
        "monitor::gradients_and_weights monitor::the_gradient_of_an_added_sum",
        "monitor_training::compiled_models", "monitor::statistics_*"),
)  # fmt: skip
