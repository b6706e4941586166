#include "kernels/plan.cuh"

namespace paged_attn {

void launch_plan(const PlanParams& params, cudaStream_t stream) {
  ptx::launch(plan_kernel, 1, kPlanThreads, sizeof(Planner::Smem), stream, params);
}

}  // namespace paged_attn
