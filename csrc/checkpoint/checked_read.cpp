// Bytes of a file, held against the sums of their blocks (hytrain/checked_read.h).
#include "hytrain/checked_read.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "hytrain/crc32.h"
#include "hytrain/summed_file.h"

namespace hytrain {
namespace {

constexpr std::uint64_t kBlock = SummedFile::kBlockBytes;
static_assert(WriteBuffer::kBytes >= kBlock, "a block that is read in part fits the buffer");

// Fewer bytes than asked for only at the file's end.
std::size_t read_all(int descriptor, char* target, std::size_t bytes, std::uint64_t offset) {
    std::size_t done = 0;
    while (done != bytes) {
        const ssize_t count =
            pread(descriptor, target + done, bytes - done, static_cast<off_t>(offset + done));
        if (count < 0) {
            if (errno == EINTR) continue;
            throw std::system_error(errno, std::generic_category(), "read");
        }
        if (count == 0) break;
        done += static_cast<std::size_t>(count);
    }
    return done;
}

class Reader {
   public:
    Reader(int descriptor, const CheckedRange& range, char* target)
        : descriptor_(descriptor), range_(range), target_(target), first_(range.begin / kBlock) {
        const std::uint64_t last = (range.end + kBlock - 1) / kBlock;
        if (range.begin >= range.end || range.end > range.file_bytes ||
            range.sums.size() != last - first_) {
            throw std::invalid_argument("the sums are not those of the range");
        }
    }

    void run(int threads) {
        // A thread takes some tens of microseconds to start, a block about a hundred to be read.
        const std::size_t useful = (range_.sums.size() + 1) / 2;
        const std::size_t others = std::min<std::size_t>(std::max(threads, 1), useful) - 1;
        std::vector<std::thread> helpers;
        helpers.reserve(others);
        try {
            for (std::size_t i = 0; i != others; ++i) helpers.emplace_back([this] { work(); });
        } catch (...) {
            // No more threads are to be had: those that there are read all of it.
        }
        work();
        for (std::thread& helper : helpers) helper.join();
        if (error_) std::rethrow_exception(error_);
    }

    std::vector<std::size_t> damaged() {
        std::sort(damaged_.begin(), damaged_.end());
        return std::move(damaged_);
    }

   private:
    void work() noexcept {
        try {
            WriteBuffer buffer;
            for (;;) {
                const std::size_t index = next_.fetch_add(1, std::memory_order_relaxed);
                if (index >= range_.sums.size()) return;
                if (!take(index, buffer.data())) {
                    std::lock_guard<std::mutex> lock(mutex_);
                    damaged_.push_back(first_ + index);
                }
            }
        } catch (...) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!error_) error_ = std::current_exception();
            next_ = range_.sums.size();  // the others stop
        }
    }

    // Whether a block is what was written.
    bool take(std::size_t index, char* buffer) {
        const std::uint64_t low = (first_ + index) * kBlock;
        const std::uint64_t high = std::min(low + kBlock, range_.file_bytes);
        const std::uint64_t begin = std::max(low, range_.begin), end = std::min(high, range_.end);
        const bool is_whole = begin == low && end == high;
        char* const place = target_ == nullptr ? nullptr : target_ + (begin - range_.begin);
        char* const block = place != nullptr && is_whole ? place : buffer;
        const std::size_t bytes = static_cast<std::size_t>(high - low);
        const bool is_right = read_all(descriptor_, block, bytes, low) == bytes &&
                              crc32(0, block, bytes) == range_.sums[index];
        if (is_right && place != nullptr && !is_whole) {
            std::memcpy(place, block + (begin - low), static_cast<std::size_t>(end - begin));
        }
        return is_right;
    }

    const int descriptor_;
    const CheckedRange& range_;
    char* const target_;
    const std::uint64_t first_;
    std::atomic<std::size_t> next_{0};
    std::mutex mutex_;  // of what follows
    std::vector<std::size_t> damaged_;
    std::exception_ptr error_;
};

}  // namespace

std::vector<std::size_t> read_checked(int descriptor, const CheckedRange& range, char* target,
                                      int threads) {
    Reader reader(descriptor, range, target);
    reader.run(threads);
    return reader.damaged();
}

}  // namespace hytrain
