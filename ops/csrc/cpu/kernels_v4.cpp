// The CPU kernels for x86-64-v4.
#include "batch_attention_kernel.h"
#include "dropout_kernel.h"
#include "ms_deform_attn_kernel.h"

namespace detr_bf::cpu {
const BatchAttentionKernels kBatchAttentionV4 = {attend_any, attend_backward_any};
const DropoutKernels kDropoutV4 = {dropout_add_any, relu_dropout_any, relu_dropout_backward_any};
const DeformableKernels kDeformableV4 = {forward_any, backward_any};
}  // namespace detr_bf::cpu
