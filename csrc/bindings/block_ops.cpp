// copy_blocks and swap_blocks: checks, then the work.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "backend.h"
#include "bindings/arg.h"
#include "bindings/device.h"
#include "bindings/ops.h"
#include "bindings/reader.h"

namespace paged_attn {
namespace {

void check_mapping_shape(const Arg& mapping) {
  mapping.require_index();
  mapping.require(mapping.rank() == 2 && mapping.size(1) == 2, "be [n, 2], (source, destination), ",
                  "got ", mapping.shape());
}

void check_pairs(const Arg& mapping, const Tensor& host, int64_t num_sources,
                 int64_t num_destinations, bool same_pool) {
  std::unordered_set<int64_t> sources, destinations;
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    const int64_t source = mapping.index_at(host, i, 0);
    const int64_t destination = mapping.index_at(host, i, 1);
    mapping.require(source >= 0 && source < num_sources, "name sources of a pool of ", num_sources,
                    " blocks, got ", source, " in pair ", i);
    mapping.require(destination >= 0 && destination < num_destinations,
                    "name destinations of a pool of ", num_destinations, " blocks, got ",
                    destination, " in pair ", i);
    mapping.require(destinations.insert(destination).second,
                    "name no destination twice, got block ", destination, " again in pair ", i);
    if (same_pool) sources.insert(source);
  }
  for (const int64_t source : sources) {
    mapping.require(destinations.count(source) == 0,
                    "not use a block as source and as destination, got block ", source);
  }
}

// A block's bytes as runs: dimensions that lie side by side are one run.
BlockRuns block_runs(const Arg& pool) {
  struct Level {
    int64_t count;
    int64_t stride;
  };
  const int64_t bytes = static_cast<int64_t>(pool.tensor().element_size());
  std::vector<Level> levels;
  for (int64_t dim = 1; dim < pool.rank() - 1; ++dim) {
    if (pool.size(dim) > 1) levels.push_back({pool.size(dim), pool.stride(dim) * bytes});
  }
  std::sort(levels.begin(), levels.end(),
            [](const Level& a, const Level& b) { return a.stride < b.stride; });
  BlockRuns runs{.address = reinterpret_cast<int64_t>(pool.data<void>()),
                 .block_stride = pool.stride(0) * bytes,
                 .outer_count = 1,
                 .inner_count = 1,
                 .run_bytes = pool.size(pool.rank() - 1) * bytes};
  size_t level = 0;
  while (level < levels.size() && levels[level].stride == runs.run_bytes) {
    runs.run_bytes *= levels[level++].count;
  }
  if (level < levels.size()) {
    runs.inner_count = levels[level].count;
    runs.inner_stride = levels[level++].stride;
  }
  if (level < levels.size()) {
    runs.outer_count = levels[level].count;
    runs.outer_stride = levels[level].stride;
  }
  runs.vector_bytes = 16;
  for (const int64_t offset :
       {runs.address, runs.block_stride, runs.outer_stride, runs.inner_stride, runs.run_bytes}) {
    while (offset % runs.vector_bytes != 0) runs.vector_bytes /= 2;
  }
  return runs;
}

void check_pools(const Arg& pool, const Arg& leader) {
  pool.require_on_device_of(leader);
  pool.require(pool.rank() == 4, "be [num_blocks, block_size, num_kv_heads, head_dim] each, got ",
               pool.shape());
  pool.require(pool.same_shape(leader), "have one shape, ", leader.shape(), ", got ", pool.shape());
  pool.require(pool.dtype() == leader.dtype(), "have one dtype, ", dtype_name(leader.dtype()),
               ", got ", dtype_name(pool.dtype()));
  pool.require_dense_rows();
  pool.require_no_overlap();
}

// Pools that overlap otherwise than as one tensor named twice.
void check_apart(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches) {
  constexpr const char* op = "copy_blocks";
  std::vector<Arg> pools;
  for (const Tensor& cache : key_caches) pools.emplace_back(op, "key_caches", cache);
  for (const Tensor& cache : value_caches) pools.emplace_back(op, "value_caches", cache);
  std::sort(pools.begin(), pools.end(),
            [](const Arg& a, const Arg& b) { return a.data<char>() < b.data<char>(); });
  for (size_t i = 0; i < pools.size(); ++i) {
    const uintptr_t end = pools[i].end_address();
    for (size_t j = i + 1;
         j < pools.size() && reinterpret_cast<uintptr_t>(pools[j].data<char>()) < end; ++j) {
      if (!pools[j].is_same_view(pools[i])) pools[j].require_apart_from(pools[i]);
    }
  }
}

}  // namespace

void copy_blocks(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  constexpr const char* op = "copy_blocks";
  Reader in(stack);
  const std::vector<Tensor> key_caches = in.tensors();
  const std::vector<Tensor> value_caches = in.tensors();
  const Arg mapping(op, "block_mapping", in.tensor());
  if (key_caches.size() != value_caches.size()) {
    fail(op, ": value_caches must have as many layers as key_caches, ", key_caches.size(), ", got ",
         value_caches.size());
  }
  check_mapping_shape(mapping);
  if (key_caches.empty()) return;

  const Arg leader(op, "key_caches", key_caches[0]);
  std::vector<BlockRuns> pools;
  for (const auto& [name, caches] :
       {std::pair("key_caches", &key_caches), std::pair("value_caches", &value_caches)}) {
    for (const Tensor& cache : *caches) {
      const Arg pool(op, name, cache);
      check_pools(pool, leader);
      pools.push_back(block_runs(pool));
    }
  }
  check_apart(key_caches, value_caches);
  const bool on_host = mapping.tensor().is_cpu() && !device::owns(mapping.tensor());
  if (!on_host) mapping.require_on_device_of(leader);
  const bool readable = mapping.tensor().is_cpu() || device::checks_values();
  if (readable) {
    check_pairs(mapping, device::to_host(mapping.tensor()), leader.size(0), leader.size(0),
                /*same_pool=*/true);
  }
  if (mapping.size(0) == 0 || leader.numel() == 0) return;

  // One upload: the pools, then, where the mapping is on the host, its pairs.
  const device::Scope scope(leader.tensor());
  const Tensor pairs = as_contiguous_int64(mapping);
  const int64_t pool_words = static_cast<int64_t>(pools.size() * sizeof(BlockRuns)) / 8;
  const int64_t pair_words = on_host ? 2 * mapping.size(0) : 0;
  const std::array<int64_t, 1> size{pool_words + pair_words};
  const Tensor table =
      torch::stable::empty({size.data(), size.size()}, ScalarType::Long, std::nullopt,
                           torch::stable::Device(torch::headeronly::DeviceType::CPU));
  int64_t* words = static_cast<int64_t*>(table.data_ptr());
  std::memcpy(words, pools.data(), pool_words * 8);
  if (on_host) std::memcpy(words + pool_words, pairs.data_ptr(), pair_words * 8);
  const Tensor uploaded = device::upload(table, leader.tensor());
  const int64_t* data = static_cast<const int64_t*>(uploaded.data_ptr());
  backend::copy_blocks(
      {.pools = reinterpret_cast<const BlockRuns*>(data),
       .pairs = on_host ? data + pool_words : static_cast<const int64_t*>(pairs.data_ptr()),
       .num_pools = static_cast<int64_t>(pools.size()),
       .num_pairs = mapping.size(0)},
      scope.stream());
}

// Torch's own copy moves the blocks: between devices it is asynchronous on the current stream
// where the host tensor is pinned, and knows every layout.
void swap_blocks(StableIValue* stack, uint64_t /*num_args*/, uint64_t /*num_outputs*/) {
  constexpr const char* op = "swap_blocks";
  Reader in(stack);
  const Arg src(op, "src", in.tensor());
  const Arg dst(op, "dst", in.tensor());
  const Arg mapping(op, "block_mapping", in.tensor());
  src.require(src.rank() >= 1, "be [num_blocks, ...], got ", src.shape());
  bool fits = dst.rank() == src.rank();
  for (int64_t dim = 1; fits && dim < src.rank(); ++dim) fits = dst.size(dim) == src.size(dim);
  dst.require(fits, "have blocks of src's shape, ", src.shape(), ", got ", dst.shape());
  dst.require(dst.dtype() == src.dtype(), "have the dtype of src, ", dtype_name(src.dtype()),
              ", got ", dtype_name(dst.dtype()));
  dst.require_no_overlap();
  check_mapping_shape(mapping);
  mapping.require(mapping.tensor().is_cpu(), "be a CPU tensor, as the host starts the copies");
  const bool same_pool = src.is_same_view(dst);
  if (!same_pool) dst.require_apart_from(src);
  check_pairs(mapping, mapping.tensor(), src.size(0), dst.size(0), same_pool);
  if (mapping.size(0) == 0) return;

  const device::Scope scope(device::owns(dst.tensor()) ? dst.tensor() : src.tensor());
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    const Tensor from =
        torch::stable::select(src.tensor(), 0, mapping.index_at(mapping.tensor(), i, 0));
    Tensor to = torch::stable::select(dst.tensor(), 0, mapping.index_at(mapping.tensor(), i, 1));
    torch::stable::copy_(to, from, /*non_blocking=*/true);
  }
}

}  // namespace paged_attn
