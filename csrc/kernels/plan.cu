#include "kernels/plan.cuh"

namespace paged_attn {

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  ptx::launch(plan_kernel, 1, kPlanThreads, sizeof(Planner::Smem), stream, params);
}

// All kernels are compiled with the same flags: one speaks for all.
int kernels_arch() { return ptx::loaded_arch(plan_kernel); }

}  // namespace paged_attn
