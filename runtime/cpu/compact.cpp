// A CPU allocator of torch that keeps live tensors close together: one region of addresses, the lowest free place that
// fits. What lies above the highest place used in a while goes back to the system. See compact.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kLeast = 16384;  // bytes; what is smaller stays with the system
constexpr size_t kLargestSpan = size_t{1} << 40, kSmallestSpan = size_t{1} << 34;
constexpr uint8_t kPriority = 1;  // torch's own has 0

using Clock = std::chrono::steady_clock;

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Where tensors lie, as offsets; it touches no memory.
class Places {
 public:
  size_t take(size_t size) {
    for (auto it = holes_.begin(); it != holes_.end(); ++it) {
      auto [start, length] = *it;
      if (length < size) continue;
      holes_.erase(it);
      if (length > size) holes_.emplace(start + size, length - size);
      return start;
    }
    const size_t start = end_;
    end_ += size;
    return start;
  }

  void give(size_t start, size_t size) {
    auto after = holes_.upper_bound(start);
    if (after != holes_.end() && start + size == after->first) {
      size += after->second;
      after = holes_.erase(after);
    }
    if (after != holes_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == start) {
        start = before->first;
        size += before->second;
        holes_.erase(before);
      }
    }
    if (start + size == end_) end_ = start;
    else holes_.emplace(start, size);
  }

  size_t end() const { return end_; }
  const std::map<size_t, size_t>& holes() const { return holes_; }

 private:
  std::map<size_t, size_t> holes_;  // by start
  size_t end_ = 0;                  // of the highest tensor
};

class Compact final : public c10::Allocator {
 public:
  explicit Compact(c10::Allocator* system) : system_(system), page_(sysconf(_SC_PAGESIZE)) {}

  bool reserve() {
    for (span_ = kLargestSpan; span_ >= kSmallestSpan; span_ /= 2) {
      void* found = mmap(nullptr, span_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (found == MAP_FAILED) continue;
      base_ = static_cast<char*>(found);
      madvise(base_, span_, MADV_HUGEPAGE);  // advice: what the kernel refuses costs time alone
      return true;
    }
    return false;
  }

  c10::DataPtr allocate(size_t size) override {
    void* data = size < kLeast ? nullptr : place(size);
    if (data == nullptr) data = system_->raw_allocate(size);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  static void release(void* data);

  void return_above(size_t start) {
    start = up(start, page_);
    if (start < touched_) madvise(base_ + start, touched_ - start, MADV_DONTNEED);
    touched_ = std::min(touched_, start);
  }

  void return_free() {
    for (auto [start, size] : places_.holes()) {
      const size_t first = up(start, page_), last = (start + size) / page_ * page_;
      if (first < last) madvise(base_ + first, last - first, MADV_DONTNEED);
    }
    return_above(places_.end());
  }

  std::mutex lock;
  Clock::duration window = std::chrono::seconds(10);
  size_t live = 0;

  size_t end() const { return places_.end(); }
  size_t touched() const { return touched_; }
  c10::Allocator* system() const { return system_; }

 private:
  void* place(size_t size) {
    const size_t rounded = up(size, kAlignment);
    char* data;
    {
      std::lock_guard<std::mutex> guard(lock);
      if (places_.end() + rounded > span_) return nullptr;
      tidy();
      const size_t start = places_.take(rounded);
      data = base_ + start;
      sizes_.emplace(data, rounded);
      live += rounded;
      reached_ = std::max(reached_, start + rounded);
      touched_ = std::max(touched_, start + rounded);
    }
    c10::profiledCPUMemoryReporter().New(data, size);
    return data;
  }

  void free(char* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes_.find(data);
    places_.give(data - base_, found->second);
    live -= found->second;
    sizes_.erase(found);
  }

  void tidy() {
    const auto now = Clock::now();
    if (now - since_ < window) return;
    return_above(std::max(reached_, places_.end()));
    reached_ = places_.end();
    since_ = now;
  }

  c10::Allocator* system_;
  size_t page_, span_ = 0;
  char* base_ = nullptr;
  Places places_;
  std::unordered_map<char*, size_t> sizes_;
  size_t reached_ = 0;  // the highest end since the window began
  size_t touched_ = 0;  // pages below may be resident
  Clock::time_point since_ = Clock::now();
};

Compact* compact = nullptr;  // never freed: tensors may outlive everything else

void Compact::release(void* data) {
  char* bytes = static_cast<char*>(data);
  const bool ours = bytes >= compact->base_ && bytes < compact->base_ + compact->span_;
  if (ours) compact->free(bytes);
  else if (data != nullptr) compact->system_->raw_deleter()(data);
}

}  // namespace

// 1 where torch's CPU tensors now come from here, 0 where another allocator has taken its place, -1 without addresses.
extern "C" int fxprec_compact_install() {
  if (compact == nullptr) {
    auto* made = new Compact(c10::GetAllocator(c10::DeviceType::CPU));
    if (!made->reserve()) {
      delete made;
      return -1;
    }
    compact = made;
    // A child of fork has one thread: the lock must not be another's. Nor does it keep free pages: the parent, which
    // writes them next, would have to copy each.
    auto in_child = [] {
      compact->return_free();
      compact->lock.unlock();
    };
    pthread_atfork([] { compact->lock.lock(); }, [] { compact->lock.unlock(); }, in_child);
  }
  c10::SetAllocator(c10::DeviceType::CPU, compact, kPriority);
  return c10::GetAllocator(c10::DeviceType::CPU) == compact;
}

// New tensors come from the system again; those there are stay.
extern "C" void fxprec_compact_uninstall() {
  if (compact != nullptr && c10::GetAllocator(c10::DeviceType::CPU) == compact)
    c10::SetAllocator(c10::DeviceType::CPU, compact->system(), kPriority);
}

// Live bytes, bytes up to the end of the highest tensor, bytes up to the end of what may be resident.
extern "C" void fxprec_compact_sizes(int64_t* out) {
  out[0] = out[1] = out[2] = 0;
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  out[0] = compact->live;
  out[1] = compact->end();
  out[2] = compact->touched();
}

extern "C" void fxprec_compact_window(double seconds) {
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  compact->window = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

extern "C" void fxprec_compact_trim() {
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  compact->return_above(compact->end());
}

// Holds the lock as a thread in the middle of a call would.
extern "C" void fxprec_compact_hold(double seconds) {
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}
