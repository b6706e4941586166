// The fragments of a row tile become its output, in the launch that makes them.
#pragma once

#include "device/ptx.cuh"
#include "device/row_results.cuh"
#include "device/softmax.cuh"
#include "device/work.cuh"
#include "mma_params.h"

namespace paged_attn {

// Whoever arrives last merges all, in their order, and nobody waits. Many fragments are merged in
// groups first, each by its last, so that none reads more than about twice the square root of their
// number.
template <int kThreads, int kRows>
class FragmentMerge {
 public:
  // `last` is a word of shared memory.
  __device__ FragmentMerge(const DecodeMmaParams& params, const Work& work, bool& last)
      : p_(params), work_(work), last_(last) {}

  // To be called by all threads, once they have written the work's fragment.
  __device__ void arrive() {
    const Cut& cut = work_.cut;
    const int size = group_size(cut.num_fragments);
    if (size == 1) {
      if (is_last(0, cut.num_fragments)) write_rows(cut.num_fragments, 1);
      return;
    }
    const int groups = (cut.num_fragments + size - 1) / size;
    const int group = work_.fragment / size;
    const int members = group + 1 < groups ? size : cut.num_fragments - group * size;
    if (members > 1) {
      if (!is_last(1 + group, members)) return;
      write_group(group * size, members);
    }
    if (is_last(0, groups)) write_rows(groups, size);
  }

 private:
  static constexpr int kDirect = 16;

  static __device__ int group_size(int num_fragments) {
    if (num_fragments <= kDirect) return 1;
    int size = kDirect / 4;
    while (size * size < num_fragments) ++size;
    return size;
  }

  // Whether this CTA is the last of `count` at a meeting of the row tile: 0, or 1 and more for its
  // groups. Those are fewer than its cuts, each of which has a semaphore.
  __device__ bool is_last(int meeting, int count) {
    ptx::fence_gpu();
    ptx::cta_sync();  // every thread's part of what others will read is written and fenced
    if (threadIdx.x == 0) {
      uint32_t* semaphore = &p_.plan.semaphores[work_.cut.first_cut + meeting];
      // Wraps to 0 at the last arrival, ready for the next launch.
      const uint32_t last = count - 1;
      last_ = ptx::atomic_increment(semaphore, last) == last;
    }
    ptx::cta_sync();  // all know whether this was the last
    if (!last_) return false;
    ptx::fence_gpu();
    return true;
  }

  // A group of one is its fragment. Others go to the second slot of a CTA that has no other work
  // than a fragment of this row tile: not the first, nor the last.
  __device__ int64_t group_slot(int first, int members) const {
    if (members == 1) return fragment_slot(work_.cut, first);
    return 2 * (int64_t{work_.cut.first_cut} + (first > 0 ? first : 1) - 1) + 1;
  }

  __device__ void write_group(int first, int members) {
    const int64_t target = group_slot(first, members);
    merge(
        members, [&](int i) { return fragment_slot(work_.cut, first + i); },
        [&](int r, int d, const float4& sum, const SoftmaxState& total) {
          const float scale = total.inverse();
          const int64_t row = target * kRows + r;
          ptx::store_global(
              &p_.fragment_out[row * p_.decode.shape.head_dim + d],
              make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
          if (d == 0) p_.fragment_lse[row] = total.lse();
        });
  }

  // `count` fragments, or groups of `size`.
  __device__ void write_rows(int count, int size) {
    const int num_fragments = work_.cut.num_fragments;
    merge(
        count,
        [&](int i) {
          const int left = num_fragments - i * size;
          return group_slot(i * size, left < size ? left : size);
        },
        [&](int r, int d, const float4& sum, SoftmaxState& total) {
          const RowTarget target = p_.decode.row_target(work_.tile, r);
          const float scale = add_sink(p_.decode, target.head, total) * total.inverse();
          const float values[4] = {sum.x, sum.y, sum.z, sum.w};
          for (int i = 0; i < 4; ++i) {
            write_output(p_.decode, target, d + i, values[i] * scale, total.lse());
          }
        });
  }

  // Hands write(r, d, sum, softmax) the sums, not normalised, of every 4 elements of each row.
  template <class Slot, class Write>
  __device__ void merge(int count, Slot slot, Write write) {
    const int head_dim = p_.decode.shape.head_dim;
    const int quads = head_dim / 4;
    for (int i = threadIdx.x; i < work_.tile.num_rows * quads; i += kThreads) {
      const int r = i / quads;
      const int d = i % quads * 4;
      SoftmaxState total;
#pragma unroll 4
      for (int part = 0; part < count; ++part) {
        total.max = fmaxf(total.max, p_.fragment_lse[slot(part) * kRows + r]);
      }
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int part = 0; part < count; ++part) {
        const int64_t row = slot(part) * kRows + r;
        const float weight = total.add(p_.fragment_lse[row]);
        const float4 values = ptx::load_global<float4>(&p_.fragment_out[row * head_dim + d]);
        sum.x += weight * values.x;
        sum.y += weight * values.y;
        sum.z += weight * values.z;
        sum.w += weight * values.w;
      }
      write(r, d, sum, total);
    }
  }

  const DecodeMmaParams& p_;
  const Work& work_;
  bool& last_;
};

}  // namespace paged_attn
