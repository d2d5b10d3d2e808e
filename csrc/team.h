// The process's worker threads. A call is led by the thread that makes it; helpers take pieces of what it
// hands out.
//
// Work is finished when its pieces are, not when every thread has passed a barrier: a helper that the system
// has put aside holds up nothing but the piece it holds, and with no helper at all the leader does everything.
// Helpers watch for work for about a millisecond, so that they are awake from one step of a decoder to the
// next, then sleep.
//
// A process that forks waits for the call that another thread leads, so that the child finds nothing halfway done. The
// child has no helpers; its first call starts its own, on the processors that its parent's were pinned to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <type_traits>
#include <vector>

namespace sash {

class Team {
 public:
  // Run leader(team) on this thread, with up to threads - 1 helpers. Calls of several threads take turns.
  template <class F>
  static void lead(int threads, F&& leader) {
    Team& team = the();
    std::lock_guard<std::mutex> turn(team.turn_);
    team.open(threads);
    leader(team);
  }

  int threads() const { return threads_; }

  // f(i) for each i below `pieces`, in any order and on any thread; returns when all are done. What a piece throws,
  // memory that is missing, ends the process: other threads may be at work on what it would unwind.
  template <class F>
  void each(int64_t pieces, F&& f) {
    if (threads_ <= 1 || pieces <= 1) {
      for (int64_t i = 0; i < pieces; i++) f(i);
      return;
    }
    run(pieces, [](void* context, int64_t i) noexcept { (*static_cast<std::remove_reference_t<F>*>(context))(i); }, &f);
  }

  // Processors of the helpers in order, from the second on, repeated as needed. The leading thread may run on all of
  // them, as whatever it starts does. None: the processors that the process had.
  static void pin(const std::vector<int>& processors);

 private:
  using Call = void (*)(void*, int64_t);

  static Team& the();
  void orphan();
  void open(int threads);
  void run(int64_t pieces, Call call, void* context);
  void help(int number);
  bool take();
  void wake();
  void settle(int number);

  std::mutex turn_;
  int threads_ = 1;
  int helpers_ = 0;
  std::vector<int> processors_;
  std::atomic<int> pinned_{0};  // how often ``pin`` was called
  alignas(64) std::atomic<uint64_t> ticket_{0xffffffffu};  // number of the job, and its next piece
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> pieces_{0};
  std::atomic<int> wanted_{0};  // helpers that may take part
  alignas(64) std::atomic<int> asleep_{0};
  std::mutex bed_;
  std::condition_variable bell_;
};

}  // namespace sash
