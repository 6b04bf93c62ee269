// A CPU allocator of torch that keeps live tensors close together: each takes the lowest free place that fits in one
// region of addresses. Pages without a tensor go back to the system once they exceed the live bytes. See compact.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kLeast = 16384;  // bytes; smaller tensors stay with the system
constexpr size_t kLargestSpan = size_t{1} << 40, kSmallestSpan = size_t{1} << 34;
constexpr size_t kPage = size_t{1} << 21;  // bytes given back at once: a whole huge page
constexpr size_t kKept = size_t{1} << 26;  // bytes of free pages that stay for the next step
constexpr uint8_t kPriority = 1;           // torch's own allocator has 0
constexpr size_t kNowhere = ~size_t{0};

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Free places in the order of their addresses: a treap whose nodes know the longest place in their subtree, so that the
// lowest place that fits is found in logarithmic time.
class Holes {
 public:
  // Cuts out the lowest place of that size; returns its start, or kNowhere if none fits.
  size_t take(size_t size) {
    if (longest(root_) < size) return kNowhere;
    const Node* found = root_;
    while (longest(found->left) >= size || found->length < size)
      found = longest(found->left) >= size ? found->left : found->right;
    const size_t start = found->start, length = remove(start);
    if (length > size) insert(start + size, length - size);
    return start;
  }

  // Adds a place that touches no other.
  void insert(size_t start, size_t length) {
    auto [below, above] = split(root_, start);
    root_ = join(join(below, new Node{start, length, length, next_rank()}), above);
  }

  // Removes the place that begins there; returns its length, or 0 if none begins there.
  size_t remove(size_t start) {
    auto [below, rest] = split(root_, start);
    auto [found, above] = split(rest, start + 1);
    root_ = join(below, above);
    const size_t length = found == nullptr ? 0 : found->length;
    delete found;
    return length;
  }

  // Returns the start of the last place that begins below, or kNowhere if none does.
  size_t last_below(size_t start) const {
    size_t last = kNowhere;
    for (const Node* node = root_; node != nullptr;) {
      if (node->start < start) last = node->start, node = node->right;
      else node = node->left;
    }
    return last;
  }

 private:
  struct Node {
    size_t start, length, longest;
    uint64_t rank;
    Node *left = nullptr, *right = nullptr;
  };

  static size_t longest(const Node* node) { return node == nullptr ? 0 : node->longest; }

  static Node* refreshed(Node* node) {
    node->longest = std::max({node->length, longest(node->left), longest(node->right)});
    return node;
  }

  // Returns the nodes below ``start``, and those from ``start`` on.
  static std::pair<Node*, Node*> split(Node* node, size_t start) {
    if (node == nullptr) return {nullptr, nullptr};
    if (node->start < start) {
      auto [left, right] = split(node->right, start);
      node->right = left;
      return {refreshed(node), right};
    }
    auto [left, right] = split(node->left, start);
    node->left = right;
    return {left, refreshed(node)};
  }

  static Node* join(Node* below, Node* above) {
    if (below == nullptr || above == nullptr) return below == nullptr ? above : below;
    if (below->rank > above->rank) {
      below->right = join(below->right, above);
      return refreshed(below);
    }
    above->left = join(below, above->left);
    return refreshed(above);
  }

  uint64_t next_rank() {  // xorshift: ranks only need to be unordered
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return state_;
  }

  Node* root_ = nullptr;
  uint64_t state_ = 0x9e3779b97f4a7c15;
};

// The places of tensors, as offsets; this class touches no memory.
class Places {
 public:
  size_t take(size_t size) {
    const size_t start = holes_.take(size);
    if (start != kNowhere) return start;
    end_ += size;
    return end_ - size;
  }

  void give(size_t start, size_t size) {
    size += holes_.remove(start + size);
    const size_t before = holes_.last_below(start);
    if (before != kNowhere) {
      const size_t length = holes_.remove(before);
      if (before + length == start) start = before, size += length;
      else holes_.insert(before, length);
    }
    if (start + size == end_) end_ = start;
    else holes_.insert(start, size);
  }

  size_t end() const { return end_; }

 private:
  Holes holes_;
  size_t end_ = 0;  // end of the highest tensor
};

// The huge pages with tensors, and the idle ones: they had a tensor, and may still be resident.
class Pages {
 public:
  void enter(size_t start, size_t size) {
    const size_t end = up(start + size, kPage) / kPage;
    if (end > tensors_.size()) tensors_.resize(end);
    for (size_t page = start / kPage; page < end; ++page)
      if (tensors_[page]++ == 0) idle_.erase(page);
  }

  void leave(size_t start, size_t size) {
    const size_t end = up(start + size, kPage) / kPage;
    for (size_t page = start / kPage; page < end; ++page)
      if (--tensors_[page] == 0) idle_.insert(page);
  }

  size_t idle() const { return idle_.size() * kPage; }

  // Gives idle pages back to the system, the highest first, until no more than ``kept`` bytes are left.
  void give_back(char* base, size_t kept) {
    while (idle() > kept) {
      const auto highest = std::prev(idle_.end());
      madvise(base + *highest * kPage, kPage, MADV_DONTNEED);
      idle_.erase(highest);
    }
  }

 private:
  std::vector<uint32_t> tensors_;  // number of tensors in each page
  std::set<size_t> idle_;
};

class Compact final : public c10::Allocator {
 public:
  explicit Compact(c10::Allocator* system) : system_(system) {}

  // Reserves addresses without memory; of a limited process, at most half of its addresses.
  bool reserve() {
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    for (span_ = kLargestSpan; span_ >= kSmallestSpan; span_ /= 2) {
      if (limit.rlim_cur != RLIM_INFINITY && span_ > limit.rlim_cur / 2) continue;
      void* found = mmap(nullptr, span_ + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (found == MAP_FAILED) continue;
      base_ = reinterpret_cast<char*>(up(reinterpret_cast<size_t>(found), kPage));
      madvise(base_, span_, MADV_HUGEPAGE);  // only advice: if the kernel refuses, only time is lost
      return true;
    }
    return false;
  }

  c10::DataPtr allocate(size_t size) override {
    void* data = size < kLeast ? nullptr : place(size);
    if (data == nullptr) data = system_->raw_allocate(size);  // raises if the system has no memory
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

  static void release(void* data);

  void give_back(size_t kept) { pages_.give_back(base_, kept); }

  std::mutex lock;
  size_t live = 0;

  size_t end() const { return places_.end(); }
  size_t idle() const { return pages_.idle(); }
  c10::Allocator* system() const { return system_; }

 private:
  void* place(size_t size) {
    if (size > span_) return nullptr;
    const size_t rounded = up(size, kAlignment);
    char* data;
    {
      std::lock_guard<std::mutex> guard(lock);
      const size_t start = places_.take(rounded);
      if (!open(places_.end())) {
        places_.give(start, rounded);
        return nullptr;
      }
      data = base_ + start;
      pages_.enter(start, rounded);
      sizes_.emplace(data, rounded);
      live += rounded;
    }
    c10::profiledCPUMemoryReporter().New(data, size);
    return data;
  }

  // Makes addresses usable up to ``end``, which asks the system for the memory, as malloc does; false if it refuses.
  bool open(size_t end) {
    if (end <= opened_) return true;
    end = up(end, kPage);
    if (end > span_ || mprotect(base_ + opened_, end - opened_, PROT_READ | PROT_WRITE) != 0) return false;
    opened_ = end;
    return true;
  }

  void free(char* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    std::lock_guard<std::mutex> guard(lock);
    auto found = sizes_.find(data);
    const size_t start = data - base_, size = found->second;
    places_.give(start, size);
    pages_.leave(start, size);
    live -= size;
    sizes_.erase(found);
    const size_t most = std::max(kKept, live);
    if (idle() > most) give_back(most / 2);
  }

  c10::Allocator* system_;
  size_t span_ = 0, opened_ = 0;
  char* base_ = nullptr;
  Places places_;
  Pages pages_;
  std::unordered_map<char*, size_t> sizes_;
};

Compact* compact = nullptr;  // never freed: tensors may outlive everything else

void Compact::release(void* data) {
  char* bytes = static_cast<char*>(data);
  const bool ours = bytes >= compact->base_ && bytes < compact->base_ + compact->span_;
  if (ours) compact->free(bytes);
  else if (data != nullptr) compact->system_->raw_deleter()(data);
}

}  // namespace

// Returns 1 if torch's CPU tensors now come from here, 0 if another allocator is in its place, -1 without addresses.
extern "C" int fxprec_compact_install() {
  if (compact == nullptr) {
    auto* made = new Compact(c10::GetAllocator(c10::DeviceType::CPU));
    if (!made->reserve()) {
      delete made;
      return -1;
    }
    compact = made;
    // A child of fork has one thread, so no other thread may hold the lock. The child gives free pages back, because
    // the parent, which writes them next, would have to copy each.
    auto in_child = [] {
      compact->give_back(0);
      compact->lock.unlock();
    };
    pthread_atfork([] { compact->lock.lock(); }, [] { compact->lock.unlock(); }, in_child);
  }
  c10::SetAllocator(c10::DeviceType::CPU, compact, kPriority);
  return c10::GetAllocator(c10::DeviceType::CPU) == compact;
}

extern "C" int fxprec_compact_is_installed() {
  return compact != nullptr && c10::GetAllocator(c10::DeviceType::CPU) == compact;
}

// New tensors come from the system again; tensors in the region stay there.
extern "C" void fxprec_compact_uninstall() {
  if (fxprec_compact_is_installed())
    c10::SetAllocator(c10::DeviceType::CPU, compact->system(), kPriority);
}

// Writes live bytes, bytes up to the end of the highest tensor, bytes of pages without a tensor that may be resident.
extern "C" void fxprec_compact_sizes(int64_t* out) {
  out[0] = out[1] = out[2] = 0;
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  out[0] = compact->live;
  out[1] = compact->end();
  out[2] = compact->idle();
}

// Gives back every page without a tensor.
extern "C" void fxprec_compact_trim() {
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  compact->give_back(0);
}

// Holds the lock as a thread in the middle of a call would.
extern "C" void fxprec_compact_hold(double seconds) {
  if (compact == nullptr) return;
  std::lock_guard<std::mutex> guard(compact->lock);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}
