package ags.judge

import java.io.{File, RandomAccessFile}
import java.nio.charset.StandardCharsets.UTF_8

import scala.io.Source
import scala.jdk.CollectionConverters._
import scala.util.Using

import org.apache.iceberg.{FileFormat, FileMetadata, Files, MetadataColumns, PartitionSpec}
import org.apache.iceberg.deletes.{Deletes, PositionDeleteIndex}
import org.apache.iceberg.io.CloseableIterable
import org.apache.iceberg.puffin.{Blob, BlobMetadata, Puffin, StandardBlobTypes}

/** Puffin files with deletion vectors, as Iceberg's Java writes and reads them. Each line of standard input is a request,
  * with its answer as a line on standard output. The words of a request have tabs between them:
  *
  *   - write FILE CREATED_BY, and DATA_FILE FIRST-LAST,FIRST-LAST... for each vector. The answer is offset and length of
  *     each blob.
  *   - read FILE. The answer is, for each blob, its offset, length, cardinality, data file and ranges.
  */
object Vectors {
  def main(args: Array[String]): Unit =
    for (line <- Source.fromInputStream(System.in, "UTF-8").getLines()) {
      val answer =
        try
          line.split("\t").toList match {
            case "write" :: file :: createdBy :: vectors => write(file, createdBy, vectors)
            case List("read", file)                      => read(file)
            case _                                       => "error: no such request"
          }
        catch { case error: Exception => s"error: $error" }
      System.out.write(s"$answer\n".getBytes(UTF_8))
      System.out.flush()
    }

  private def write(file: String, createdBy: String, vectors: List[String]): String =
    Using.resource(Puffin.write(Files.localOutput(new File(file))).createdBy(createdBy).build()) { writer =>
      val made = vectors.grouped(2).map(one => writer.write(blob(one(0), one(1))))
      made.map(one => s"${one.offset}\t${one.length}").mkString("\t")
    }

  // As BaseDVFileWriter makes it.
  private def blob(dataFile: String, ranges: String): Blob = {
    val positions = ranges.split(",").iterator.map(_.split("-").map(_.toLong)).flatMap(ends => ends(0) to ends(1))
    val all = positions.map(Long.box).toList.asJava
    val index = Deletes.toPositionIndex(CloseableIterable.withNoopClose[java.lang.Long](all))
    val properties = Map("referenced-data-file" -> dataFile, "cardinality" -> index.cardinality.toString)
    val fields = List(Int.box(MetadataColumns.ROW_POSITION.fieldId)).asJava
    new Blob(StandardBlobTypes.DV_V1, fields, -1, -1, index.serialize, null, ordered(properties))
  }

  private def ordered(properties: Map[String, String]): java.util.Map[String, String] = {
    val made = new java.util.LinkedHashMap[String, String]
    for (name <- List("referenced-data-file", "cardinality")) made.put(name, properties(name))
    made
  }

  private def read(file: String): String =
    Using.resource(Puffin.read(Files.localInput(file)).build()) { reader =>
      reader.fileMetadata.blobs.asScala.map(vector(file, _)).mkString("\t")
    }

  private def vector(file: String, blob: BlobMetadata): String = {
    val dataFile = blob.properties.get("referenced-data-file")
    val cardinality = blob.properties.get("cardinality")
    val bytes = new Array[Byte](blob.length.toInt)
    Using.resource(new RandomAccessFile(file, "r")) { input =>
      input.seek(blob.offset)
      input.readFully(bytes)
    }
    val entry = FileMetadata
      .deleteFileBuilder(PartitionSpec.unpartitioned)
      .ofPositionDeletes()
      .withFormat(FileFormat.PUFFIN)
      .withPath(file)
      .withFileSizeInBytes(new File(file).length)
      .withReferencedDataFile(dataFile)
      .withContentOffset(blob.offset)
      .withContentSizeInBytes(blob.length)
      .withRecordCount(cardinality.toLong)
      .build()
    val ranges = Seq.newBuilder[String]
    var (first, last) = (-2L, -2L)
    PositionDeleteIndex.deserialize(bytes, entry).forEach { position: Long =>
      if (position != last + 1) {
        if (first >= 0) ranges += s"$first-$last"
        first = position
      }
      last = position
    }
    ranges += s"$first-$last"
    s"${blob.offset}\t${blob.length}\t$cardinality\t$dataFile\t${ranges.result().mkString(",")}"
  }
}
