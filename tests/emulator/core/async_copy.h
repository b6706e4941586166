// Copies from global to shared memory that a thread starts and later waits for (cp.async).
//
// Hardware may perform a copy at any moment between the two. Here it is as harmful as it may be:
// the destination is poisoned with 0xff when the copy is issued, which shows to whoever still reads
// what was there before, and written only when the issuing thread waits for it, from what the
// source holds then, which shows to whoever reads without a wait or changes the source too early.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.h"

namespace emu {

// Copies the first `source_size` of `size` bytes and writes zeroes to the rest; `size` is 4, 8 or
// 16, and both addresses are aligned to it. Bytes of the source that are not copied are not
// accessed. Throws Error if either side must not be, or if another copy to the same place is
// pending: nothing orders the two.
void async_copy(uint32_t shared, const void* source, size_t size, size_t source_size,
                const Site& site = Site::current());

// Makes a group of the running thread's copies since its last one, possibly of none.
void async_copy_commit();

// Performs the copies of all the thread's groups but the newest `pending`.
void async_copy_wait(size_t pending);

// Performs all the thread's copies, those in no group too.
void async_copy_wait_all();

// Whether a copy that has not been performed writes to any of these bytes.
bool in_flight(const void* address, size_t size);

namespace async {

// For the scheduler: a CTA starts; its last one has ended, or the launch has failed; the running
// thread has returned from the kernel, which throws Error if it did not wait for all its copies.
void start_cta(unsigned num_threads);
void end_launch();
void exit_thread();

}  // namespace async

}  // namespace emu
