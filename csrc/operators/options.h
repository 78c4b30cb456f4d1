// The options of the row norms. Each is declared here and nowhere else: its type, name, default,
// range and sentence. The structs below, the schemas, the dispatcher's signatures, the constants of
// the backward's node, what compiled autograd collects, the checks, the bindings, and the
// signatures and docs of Python's functions and modules are all made from these lists.
//
// An option that a norm is to take: a word in its list. A new one: an entry, its name in the lists
// of the norms that take it, and what it does (maths/row_norm.h, by Norm::params, or the kernels).
#pragma once

#include <string>

// ---- Each option, once: OPTION(type, name, default, range, sentence) ----
// type: double, bool or std::string; range: any, finite, two_columns (a row needs two elements or
// more), one_of(...).

#define FUSEDNORM_OPTION_weight_offset(OPTION)                                              \
  OPTION(double, weight_offset, 0.0, finite,                                                \
         "the gain is ``weight_offset + weight``, formed in the accumulation type (1: "     \
         "zero-centred gamma, Gemma's form). A plain checkpoint's weights of 1 would give " \
         "a gain of 2: subtract it.")
#define FUSEDNORM_OPTION_casting_mode(OPTION)                                                 \
  OPTION(std::string, casting_mode, "default", one_of("default", "llama"),                    \
         "\"default\" rounds once, at the store. \"llama\" rounds ``x * rstd`` to the dtype " \
         "of what is normalized before the product with the weight, as Hugging Face's "       \
         "``LlamaRMSNorm`` does.")
#define FUSEDNORM_OPTION_eps_outside(OPTION)                                                 \
  OPTION(bool, eps_outside, false, any,                                                      \
         "divide by ``s + eps`` in place of ``sqrt(s**2 + eps)``, as in the \"annotated "    \
         "Transformer\"; s is the standard deviation, or RMSNorm's root mean square. Where " \
         "it is 0 its derivative is taken as 0.")
#define FUSEDNORM_OPTION_unbiased(OPTION)                                                      \
  OPTION(bool, unbiased, false, two_columns,                                                   \
         "variance over N - 1, as in the \"annotated Transformer\"; needs rows of 2 elements " \
         "or more.")

// ---- Which norm takes which ----

// clang-format off
#define FUSEDNORM_LAYER_NORM_OPTIONS(OPTION) \
  FUSEDNORM_OPTION_weight_offset(OPTION) \
  FUSEDNORM_OPTION_eps_outside(OPTION) \
  FUSEDNORM_OPTION_unbiased(OPTION)

#define FUSEDNORM_RMS_NORM_OPTIONS(OPTION) \
  FUSEDNORM_OPTION_weight_offset(OPTION) \
  FUSEDNORM_OPTION_casting_mode(OPTION) \
  FUSEDNORM_OPTION_eps_outside(OPTION)

#define FUSEDNORM_EVERY_OPTION(OPTION) \
  FUSEDNORM_OPTION_weight_offset(OPTION) \
  FUSEDNORM_OPTION_casting_mode(OPTION) \
  FUSEDNORM_OPTION_eps_outside(OPTION) \
  FUSEDNORM_OPTION_unbiased(OPTION)
// clang-format on

// ---- As C++ callers give them ----

#define FUSEDNORM_OPTION_FIELD(type, name, fallback, range, sentence) type name = fallback;

namespace fusednorm {

/// What layer_norm takes besides tensors and eps: FUSEDNORM_LAYER_NORM_OPTIONS.
struct LayerNormOptions {
  FUSEDNORM_LAYER_NORM_OPTIONS(FUSEDNORM_OPTION_FIELD)
};

/// What rms_norm takes besides tensors and eps: FUSEDNORM_RMS_NORM_OPTIONS.
struct RmsNormOptions {
  FUSEDNORM_RMS_NORM_OPTIONS(FUSEDNORM_OPTION_FIELD)
};

}  // namespace fusednorm
