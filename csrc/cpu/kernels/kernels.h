// What all sources of CPU kernels begin with. Each is compiled once for each instruction set
// (FUSEDNORM_ISA names it) and sets its entries of that set's table; kernel_table.cpp puts the
// tables together.
//
// Which accumulator an element goes to depends on its column and the row's length alone.
//
// Nothing inline from the standard library may be emitted here: the linker would be free to use the
// AVX-512 copy of it in the rest of the program (tests/check_symbols.sh looks for such symbols).
#pragma once

#include "row_kernels.h"

#if defined(FUSEDNORM_AVX512) || defined(FUSEDNORM_AVX2)
#include <immintrin.h>
#endif

namespace fusednorm::cpu::FUSEDNORM_ISA {

void set_forward(KernelTable* table);
void set_backward(KernelTable* table);
void set_add(KernelTable* table);
void set_group(KernelTable* table);
void set_parameters(KernelTable* table);

namespace {

// In this order: each uses what stands before it.
// clang-format off
#include "simd.h"
#if defined(FUSEDNORM_AVX512)
#include "simd_avx512.h"
#else
#include "simd_vectors.h"
#endif
#include "simd_pairs.h"
#include "columns.h"
#include "stream.h"
#include "loads.h"
#include "statistics.h"
#include "affine.h"
#include "next_rows.h"
// clang-format on

/// f(index in the table, an element) for each dtype that this instruction set has kernels of its
/// own for. FUSEDNORM_ONLY_BF16: AVX-512 with bf16 instructions; the rest is AVX-512's.
template <class BFloat16, class F>
FN_INLINE void for_dtypes(F f) {
#if !defined(FUSEDNORM_ONLY_BF16)
  f(static_cast<int>(DType::kFloat64), double{});
  f(static_cast<int>(DType::kFloat32), float{});
  f(static_cast<int>(DType::kFloat16), float16{});
#endif
  f(static_cast<int>(DType::kBFloat16), BFloat16{});
}

}  // namespace
}  // namespace fusednorm::cpu::FUSEDNORM_ISA
