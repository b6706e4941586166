// merge_states: checks, then the backend's kernel.
#include <torch/csrc/stable/ops.h>

#include <limits>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/device.h"
#include "bindings/ops.h"
#include "bindings/reader.h"

namespace paged_attn {

void merge_states(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  Reader in(stack);
  const char* op = "merge_states";
  const Arg out(op, "out", in.tensor());
  const Arg lse(op, "lse", in.tensor());
  const Arg out_a(op, "out_a", in.tensor());
  const Arg lse_a(op, "lse_a", in.tensor());
  const Arg out_b(op, "out_b", in.tensor());
  const Arg lse_b(op, "lse_b", in.tensor());

  const DType dtype = out_a.kernel_dtype(/*allow_8bit=*/false);
  out_a.require(out_a.rank() >= 1, "be [..., head_dim], got ", out_a.shape());
  for (const Arg* arg : {&out_a, &out_b, &out}) {
    arg->require_on_device_of(out_a);
    arg->require(arg->same_shape(out_a), "have the shape of out_a, ", out_a.shape(), ", got ",
                 arg->shape());
    arg->require(arg->dtype() == out_a.dtype(), "have the dtype of out_a, ",
                 dtype_name(out_a.dtype()), ", got ", dtype_name(arg->dtype()));
  }
  for (const Arg* arg : {&lse_a, &lse_b, &lse}) {
    arg->require_on_device_of(out_a);
    arg->require(arg->one_per_row_of(out_a), "have the shape of out_a without head_dim, ",
                 out_a.shape(), ", got ", arg->shape());
    arg->require(arg->dtype() == ScalarType::Float, "be float32, got ", dtype_name(arg->dtype()));
  }
  out.require(out.tensor().is_contiguous(), "be contiguous");
  lse.require(lse.tensor().is_contiguous(), "be contiguous");

  const int64_t head_dim = out_a.size(out_a.rank() - 1);
  out_a.require(head_dim >= 1 && head_dim <= std::numeric_limits<int32_t>::max(),
                "have a head_dim of at least 1, got ", out_a.shape());
  if (out_a.numel() == 0) return;
  const device::Scope scope(out_a.tensor());
  const Tensor a = torch::stable::contiguous(out_a.tensor());
  const Tensor b = torch::stable::contiguous(out_b.tensor());
  const Tensor dense_lse_a = torch::stable::contiguous(lse_a.tensor());
  const Tensor dense_lse_b = torch::stable::contiguous(lse_b.tensor());
  backend::merge_states({.out = out.data<void>(),
                         .lse = lse.data<float>(),
                         .out_a = a.data_ptr(),
                         .lse_a = static_cast<const float*>(dense_lse_a.data_ptr()),
                         .out_b = b.data_ptr(),
                         .lse_b = static_cast<const float*>(dense_lse_b.data_ptr()),
                         .dtype = dtype,
                         .num_rows = out_a.numel() / head_dim,
                         .head_dim = static_cast<int32_t>(head_dim)},
                        scope.stream());
}

}  // namespace paged_attn
