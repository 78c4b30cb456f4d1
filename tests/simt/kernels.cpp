// The CUDA kernels, unmodified, as C++: device.cuh finds simt.h in place of the machine.
#include "row_norm_launch.cu"
