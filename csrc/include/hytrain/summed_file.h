// A file that is written from beginning to end and checksummed on the way: without the GIL, and
// past the system's page cache where the file system supports that.
//
// A page-cached write costs five times the CPU time of a direct one, because the kernel copies each
// byte into a page that it has to find first and its threads write it from there. Training beside
// a save lacks that time. A direct write needs aligned memory, so bytes are collected in a buffer
// that stays in the cores' caches, and are checksummed on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hytrain {

// A page-aligned buffer of kBytes; buffers that are given back are reused for the next file.
class WriteBuffer {
   public:
    static constexpr std::size_t kBytes = std::size_t{2} << 20;

    WriteBuffer();  // throws std::bad_alloc
    ~WriteBuffer();
    WriteBuffer(const WriteBuffer&) = delete;
    WriteBuffer& operator=(const WriteBuffer&) = delete;
    char* data() const { return data_; }

    // Frees the buffers that no file uses.
    static void trim();

   private:
    char* data_;
};

class SummedFile {
   public:
    // The file has one checksum for every kBlockBytes of it.
    static constexpr std::size_t kBlockBytes = std::size_t{1} << 20;

    // `descriptor` is at the file's beginning and stays the caller's.
    explicit SummedFile(int descriptor) : descriptor_(descriptor) {}

    // Appends; returns the CRC-32 of these bytes. Throws std::system_error if they, or bytes before
    // them, could not be written: the file is unusable then.
    std::uint32_t write(const void* data, std::size_t bytes);

    // Whether `bytes` more fit in the buffer, so that write does not wait for the disk.
    bool stays(std::size_t bytes) const { return used_ + bytes < WriteBuffer::kBytes; }

    // Hands all bytes to the system; only then may others read or sync the file.
    void flush();

    std::uint64_t num_bytes() const { return num_bytes_; }
    // The CRC-32 of each block; the last block's covers what it has so far.
    std::vector<std::uint32_t> sums() const;

   private:
    void hand_over(std::size_t bytes);
    void set_direct(bool direct);
    void begin_writeback(std::uint64_t begin, std::uint64_t end);

    int descriptor_;
    WriteBuffer buffer_;
    std::size_t used_ = 0;  // of the buffer
    std::uint64_t num_bytes_ = 0;
    std::uint64_t handed_over_ = 0;
    std::uint64_t written_back_ = 0;
    std::vector<std::uint32_t> blocks_;
    std::uint32_t sum_ = 0;  // of the last block
    bool is_direct_ = false;
    bool can_be_direct_ = true;
};

}  // namespace hytrain
